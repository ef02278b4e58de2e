"""Results as tables for people; the same results as plain data are what ``--json`` prints."""

from __future__ import annotations

from typing import Any

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
    for row in _cost_rows(summary["step_cost"]):
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


def _nats(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.3f} nats"
