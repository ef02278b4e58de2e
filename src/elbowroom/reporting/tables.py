"""Results as tables for people; the same results as plain data are what ``--json`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from elbowroom.units import format_bytes, format_seconds


def train_table(summary: dict[str, Any]) -> RenderableType:
    """A training run's summary (see ``training.loop.train``)."""
    table = _table(f"{summary['model']}, {summary['n_parameters']:,} parameters")
    steps = f"{summary['steps']} of {summary['max_steps']}"
    table.add_row("steps", steps + (" (interrupted)" if summary["interrupted"] else ""))
    table.add_row("time", format_seconds(summary["duration_s"]))
    table.add_row("tokens seen", f"{summary['tokens_seen']:,}")
    table.add_row("validation loss at start", _nats(summary["validation_loss_start"]))
    table.add_row("validation loss at end", _nats(summary["validation_loss_end"]))
    table.add_section()
    for row in _plan_rows(summary) if summary.get("budget") else _cost_rows(summary["step_cost"]):
        table.add_row(*row)
    table.add_section()
    table.add_row("written to", Text(summary["run_dir"]))
    if not summary["sample"]:
        return table
    return Group(table, Panel(Text(summary["sample"]), title="a sample of what it writes", title_align="left"))


def check_table(result: dict[str, Any]) -> RenderableType:
    """The result of a check (see ``training.check.check``)."""
    table = _table(f"{result['model']}: checkpointed against plain")
    table.add_row("equal, bit for bit", "yes" if result["equal"] else "NO")
    if not result["equal"]:
        table.add_row("first difference", Text(result["first_difference"]))
    table.add_row("steps compared", str(result["steps"]))
    table.add_row("gradients compared", str(result["n_gradients"]))
    table.add_row("buffers compared", str(result["n_buffers"]))
    table.add_row("regions", str(result["n_regions"]))
    table.add_section()
    for row in _cost_rows(result["step_cost"]):
        table.add_row(*row)
    proof = result["proof"]
    if proof is not None:
        table.add_section()
        table.add_row("proof: operators recorded", str(proof["operators"]))
        table.add_row("proof: operators proved bit for bit", str(proof["proved"]))
        for kept in proof["kept"]:
            what = f"kept: {kept['operator']} at {kept['line']}"
            table.add_row(Text(what), Text(f"{format_bytes(kept['nbytes'])}, {kept['why']}"))
    return table


def plan_table(result: dict[str, Any]) -> RenderableType:
    """The trade-off of a model's step (see ``training.tradeoff.trade_off``): plans, the chosen one marked, and rules of
    thumb, each beside the plan for its peak. Times are over the plain step's."""
    front, chosen = result["front"], result["chosen"]
    plans = _columns(result["title"], "budget", "peak", "time", "kept", "replayed")
    others = [p for p in _a_dozen(front["plans"]) if p["budget_bytes"] != chosen["budget_bytes"]]
    for point in sorted([*others, chosen], key=lambda point: int(point["budget_bytes"])):
        budget, mark = format_bytes(point["budget_bytes"]), point is chosen
        peak, time, replayed = _point_row(point, front)
        cells = ("→" if mark else "", budget, peak, time, format_bytes(point["kept_bytes"]), replayed)
        plans.add_row(*cells, style="bold" if mark else None)
    rules = _columns("rules of thumb, and plans for the same peaks", "", "peak", "time", "replayed", "planned", "saves")
    for point, rival in sorted(zip(front["baselines"], front["rivals"], strict=True), key=lambda p: p[0]["peak_bytes"]):
        saved = f"{1 - rival['step_s'] / point['step_s']:.1%}"
        rules.add_row(Text(point["name"]), *_point_row(point, front), _time(rival, front), saved)
    written = [result[name] for name in ("plan_file", "picture", "timeline") if result[name]]
    facts = [
        f"without help: {format_bytes(front['plain_peak_bytes'])}, of which {format_bytes(front['resting_bytes'])} are "
        f"there before the step begins",
        f"the least: {format_bytes(front['least_bytes'])}, {front['least_where']}",
        f"peak of the plan (→): {result['where']}",
        f"a faster plan from these options: at most {max(0.0, result['gap']):.1%} faster",
        f"written: {', '.join(written)}",
    ]
    return Group(plans, rules, Text("\n".join(facts)))


def _a_dozen(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most twelve of them, evenly, first and last among them."""
    n = min(12, len(points))
    return [points[round(i * (len(points) - 1) / max(1, n - 1))] for i in range(n)]


def _columns(title: str, *names: str) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    if names[0]:
        table.add_column("")
    for name in names:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    return table


def _point_row(point: dict[str, Any], front: dict[str, Any]) -> tuple[str, str, str]:
    """Peak, time and operators replayed."""
    peak = f"{format_bytes(point['peak_bytes'])} {point['peak_bytes'] / front['plain_peak_bytes']:4.0%}"
    return peak, _time(point, front), f"{point['replayed']:,}"


def _time(point: dict[str, Any], front: dict[str, Any]) -> str:
    return f"{point['step_s'] / front['plain_step_s']:.3f}"


def _table(title: str) -> Table:
    # Text, here and for all that users name: rich reads [brackets] and :words: in plain strings as its own.
    table = Table(title=Text(title), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    return table


def _cost_rows(cost: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Peak and time of one step with and without checkpointing, and how they compare."""
    if cost is None:
        return [("peak of one step", "not measured")]
    plain, checkpointed = cost["plain"], cost.get("checkpointed")
    rows = [("peak of one step, without checkpointing", format_bytes(plain["peak_bytes"]))]
    if checkpointed:
        ratio = checkpointed["peak_bytes"] / plain["peak_bytes"]
        rows.append(("peak of one step, with", f"{format_bytes(checkpointed['peak_bytes'])} ({ratio:.0%})"))
    rows.append(("time of one step, without", format_seconds(plain["step_s"])))
    if checkpointed:
        extra = f"{cost['extra_time_pct']:+.1f} %"
        rows.append(("time of one step, with", f"{format_seconds(checkpointed['step_s'])} ({extra})"))
    return rows


def _plan_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """A run under a budget: what was promised and what was measured. All peaks are of the whole step."""
    plan, cost = summary["plan"], summary["step_cost"]
    if plan is None:
        return [("budget", summary["budget"]), ("plan", "none: plans begin with the second step")]
    whole, measured = plan["plain_peak_bytes"], plan["measured_peak_bytes"]
    rows = [
        ("budget of one step", format_bytes(plan["budget_bytes"])),
        ("there before a step begins", format_bytes(plan["resting_bytes"])),
        ("peak of one step without a plan, predicted", format_bytes(whole)),
        ("peak of one step, predicted", f"{format_bytes(plan['peak_bytes'])} ({plan['peak_bytes'] / whole:.0%})"),
        ("peak of one step, measured", f"{format_bytes(measured)} ({measured / whole:.0%})" if measured else "not yet"),
        ("extra time, predicted", f"{plan['extra_time_pct']:+.1f} %"),
    ]
    if cost is not None:
        plain, planned = (format_seconds(cost[name]["step_s"]) for name in ("plain", "checkpointed"))
        rows.append(("extra time, measured", f"{cost['extra_time_pct']:+.1f} %"))
        rows.append(("time of one step, without a plan and with", f"{plain}, {planned}"))
    return rows


def _nats(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.3f} nats"
