"""What a budget costs: ``elbowroom.fit`` at many budgets beside torch's checkpointing, on one work, CPU.

    python benchmarks/budget.py gpt|deep|conv|llama|mixtral [--in-place] [--quick] [--rounds N] [--json FILE]

Plans are made for ten budgets from the least feasible to vanilla's own peak, for the peak of each peer, and for 70% of
vanilla's. Protocol and contenders' company are those of ``foundation.py``: one process, the very same parameters,
turns (A B C A B C ...), ratios of medians to vanilla. Every step before the timed rounds has its gradients compared
with vanilla's bit for bit; a plan's buffers too. Peers update BatchNorm's statistics twice a step: the table says so.

A peak is counted by ``elbowroom.Meter``, above the start of the step; a budget is of the whole process, so what rests
at the start is added. The steps of a plan: 1 is frugal and profiled, 2 is the first under the plan, 3 is metered as a
usual one, 4 as one that proves again. ``fit`` proves and meters now and then (2, 4, 8, 16 ...): six more steps settle
it, and the timed rounds begin with step 11. One more step is metered after them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import foundation  # first: it has idle threads sleep, which must be said before torch loads
import peers
import torch
import works
from promises import AGAIN, LEAST, SEVENTY, VANILLA, WHOLE, Row, budget_of, checks, predicted_bytes, predicted_ratio
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import elbowroom

# ----------------------------------------------------------------------------------------------------
# Nouns
# ----------------------------------------------------------------------------------------------------

#: Sizes of the smoke runs.
QUICK: dict[str, dict[str, Any]] = {
    "gpt": {"vocabulary": 512, "dim": 128, "n_heads": 4, "n_layers": 6, "sequence_length": 128},
    "deep": {"vocabulary": 128, "dim": 96, "n_heads": 4, "n_layers": 12, "sequence_length": 128},
    "conv": {"batch_size": 4, "resolution": 64},
    "llama": {"vocabulary": 256, "dim": 96, "n_layers": 4, "sequence_length": 64},
    "mixtral": {"vocabulary": 256, "dim": 96, "n_layers": 4, "sequence_length": 64},
}


class Still(torch.optim.Optimizer):
    """Changes nothing, for contenders share the parameters; but the end of a step is seen as in any training."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class Trainee:
    """A copy of the work, with its optimizer."""

    def __init__(self, work: works.Work) -> None:
        self.work = work
        self.model = work.model
        self._optimizer = Still(work.model.parameters())

    def backward(self) -> None:
        self.work.backward()

    def end_step(self) -> None:
        self._optimizer.step()
        self.model.zero_grad()


Digests = dict[str, bytes]

#: First steps of a contender, all compared with vanilla's: some without the meter, the others under it.
N_COMPARED, N_UNMETERED = 4, 2

# ----------------------------------------------------------------------------------------------------
# Measuring
# ----------------------------------------------------------------------------------------------------


class Bench:
    """The contenders of one work: sets up, compares and meters them one by one, then times all in turns."""

    def __init__(self, work: works.Work, n_plans: int, n_settling: int) -> None:
        self._n_settling = n_settling
        self.rows: list[Row] = []
        self._entries: list[Trainee] = []
        n_contenders = 2 + len(peers.contenders(work.name)) + 1 + n_plans
        # All made now: a copy has buffers of its own, and what rests must stay the same from plan to plan.
        self._spare = [Trainee(work.sharing()) for _ in range(n_contenders)]
        self._expected = list(_plain_steps(Trainee(work)))  # vanilla's gradients and buffers, step by step

    @property
    def vanilla(self) -> Row:
        return self.rows[0]

    def enter_vanilla(self, name: str) -> None:
        """Plain autograd."""
        self._check(Row(name, "vanilla"), self._spare.pop())

    def enter_peer(self, name: str, apply: Callable[[works.Work], None]) -> None:
        entry = self._spare.pop()
        apply(entry.work)
        self._check(Row(name, "peer"), entry)

    def least_allowed_bytes(self) -> int:
        """What the most frugal plan takes above the start of a step: asked with a budget that is too small for any."""
        entry = self._spare.pop()
        resting_bytes = _resting_bytes()
        # More than what rests, and less than the gradients, without which there is no step.
        gradient_bytes = sum(p.nbytes for p in entry.model.parameters())
        elbowroom.fit(entry.model, budget=resting_bytes + gradient_bytes // 2)
        try:
            for _ in range(2):
                entry.backward()
                entry.end_step()
        except elbowroom.InfeasibleBudgetError as error:
            _say(f"least: {error}")
            return error.least_bytes - resting_bytes
        finally:
            elbowroom.unfit(entry.model)
        raise RuntimeError("a budget below the bytes of the gradients was not refused")

    def enter_plan(self, name: str, allowed_bytes: int) -> None:
        """``fit`` with a budget of what rests now and ``allowed_bytes``."""
        entry = self._spare.pop()
        row = Row(name, "plan", allowed_bytes=allowed_bytes, budget_bytes=_resting_bytes() + allowed_bytes)
        elbowroom.fit(entry.model, budget=row.budget_bytes)
        with _feasible(row):
            self._check(row, entry)
            for _ in range(self._n_settling):
                entry.backward()
                entry.end_step()

    def _check(self, row: Row, entry: Trainee) -> None:
        """Two steps to warm up and two under the meter, each compared with vanilla's."""
        self.rows.append(row)
        self._entries.append(entry)
        for step, (gradients, buffers) in enumerate(self._expected, start=1):
            if step <= N_UNMETERED:
                begin_s = time.perf_counter()
                entry.backward()
                row.warmup_s.append(time.perf_counter() - begin_s)
            else:
                _meter_step(row, entry)
            _demand_equal(gradients, _gradients(entry.model), f"{row.name}, step {step}: the gradient of")
            row.keeps_buffers = row.keeps_buffers and buffers == _buffers(entry.model)
            if row.kind == "plan":
                _demand_equal(buffers, _buffers(entry.model), f"{row.name}, step {step}: the buffer")
                _note_plan(row, entry, usual=step == N_UNMETERED + 1)
            entry.end_step()
        _say(f"peak {row.peak_bytes:,} bytes, first step {row.warmup_s[0]:.3f} s: {row.name}")

    def time(self, n_rounds: int, *, least_round_s: float) -> None:
        """Rounds in turns, of as many steps as vanilla needs for ``least_round_s``; then each is metered once more."""
        n_steps = max(1, math.ceil(least_round_s / min(self.vanilla.warmup_s)))
        for number in range(1, n_rounds + 1):
            _say(f"round {number} of {n_rounds}, {n_steps} step(s) of each contender")
            for row, entry in self._feasible_ones():
                with _feasible(row):
                    wall_s, cpu_s = time.perf_counter(), time.process_time()
                    for _ in range(n_steps):
                        entry.backward()
                        entry.end_step()
                    row.wall_s.append((time.perf_counter() - wall_s) / n_steps)
                    row.cpu_s.append((time.process_time() - cpu_s) / n_steps)
        gradients, _ = self._expected[0]
        for row, entry in self._feasible_ones():
            with _feasible(row):
                _meter_step(row, entry)
                _demand_equal(gradients, _gradients(entry.model), f"{row.name}, at the end: the gradient of")
                if row.kind == "plan":
                    _note_plan(row, entry, usual=False)
                entry.end_step()

    def _feasible_ones(self) -> list[tuple[Row, Trainee]]:
        return [(row, entry) for row, entry in zip(self.rows, self._entries, strict=True) if row.least_bytes is None]


@contextlib.contextmanager
def _feasible(row: Row) -> Iterator[None]:
    """Notes in the row what ``fit`` complains about, and if the budget turns out to be infeasible."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except elbowroom.InfeasibleBudgetError as error:
            row.least_bytes = error.least_bytes
            row.predicted = None
            row.wall_s, row.cpu_s = [], []
            _say(f"{row.name}: {error}")
    for warning in caught:
        _say(f"{row.name}: {warning.message}")
        row.complaints.append(str(warning.message))


def _note_plan(row: Row, entry: Trainee, *, usual: bool) -> None:
    """Keeps the prediction of the step whose peak counts as usual, and whether there was any other plan."""
    plan = elbowroom.plan(entry.model)
    if plan is None:  # in the first step
        return
    predicted = asdict(plan.predicted) | {"gap": plan.predicted.gap, "resting_bytes": plan.resting_bytes}
    before = row.predicted or predicted
    row.replanned = row.replanned or predicted["peak_bytes"] != before["peak_bytes"]
    if usual or row.predicted is None:
        row.predicted = predicted


def _plain_steps(trainee: Trainee) -> Iterator[tuple[Digests, Digests]]:
    """Gradients and buffers after each of the first steps; the parameters stay as they are."""
    for _ in range(N_COMPARED):
        trainee.backward()
        yield _gradients(trainee.model), _buffers(trainee.model)
        trainee.end_step()


def _meter_step(row: Row, entry: Trainee) -> None:
    """One step under the meter; its gradients are left in place."""
    with elbowroom.Meter() as meter:
        entry.backward()
    row.peak_bytes = row.peak_bytes or meter.peak_bytes
    if meter.start_bytes + meter.peak_bytes > row.resting_bytes + row.highest_bytes:
        row.highest_bytes, row.resting_bytes = meter.peak_bytes, meter.start_bytes


def _resting_bytes() -> int:
    with elbowroom.Meter() as meter:
        pass
    return meter.start_bytes


def _gradients(model: nn.Module) -> Digests:
    return {name: _digest(parameter.grad) for name, parameter in model.named_parameters()}


def _buffers(model: nn.Module) -> Digests:
    return {name: _digest(buffer) for name, buffer in model.named_buffers()}


def _digest(tensor: Tensor | None) -> bytes:
    """Equal for equal bits. Not the tensor itself: that would be there while others' steps are budgeted."""
    if tensor is None:
        return b""
    return hashlib.blake2b(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data).digest()


def _demand_equal(expected: Digests, found: Digests, what: str) -> None:
    for name, digest in expected.items():
        if found[name] != digest:
            raise foundation.UnequalError(f"{what} {name} is not vanilla's")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(
    work: works.Work, *, n_budgets: int, n_settling: int, n_rounds: int, least_round_s: float, with_plans: bool
) -> list[Row]:
    """All contenders on ``work``. Raises UnequalError on the first gradient that is not vanilla's.

    ``n_settling``: steps of a plan between those that are compared and the timed rounds. ``least_round_s``: a round is
    of as many steps as vanilla needs for it. Without ``with_plans`` only vanilla and the peers.
    """
    named = peers.contenders(work.name)
    bench = Bench(work, n_plans=n_budgets + len(named) + 1, n_settling=n_settling)
    bench.enter_vanilla(VANILLA)
    bench.enter_vanilla(AGAIN)
    for name, apply in named.items():
        bench.enter_peer(name, apply)
    if with_plans:
        for name, allowed_bytes in _budgets(bench, n_budgets):
            bench.enter_plan(name, allowed_bytes)
    bench.time(n_rounds, least_round_s=least_round_s)
    return bench.rows


def _budgets(bench: Bench, n_budgets: int) -> list[tuple[str, int]]:
    """Names and bytes above the start, from small to large; several may be equal."""
    whole_bytes, least_bytes = bench.vanilla.peak_bytes, bench.least_allowed_bytes()
    budgets = [(budget_of(row), row.peak_bytes) for row in bench.rows if row.kind == "peer"]
    budgets.append((SEVENTY, whole_bytes * 7 // 10))
    budgets += [(LEAST, least_bytes), (WHOLE, whole_bytes)]
    for number in range(1, n_budgets - 1):
        allowed_bytes = least_bytes + number * (whole_bytes - least_bytes) // (n_budgets - 1)
        budgets.append((f"step {number + 1} of {n_budgets}", allowed_bytes))
    return sorted(budgets, key=lambda budget: budget[1])


# ----------------------------------------------------------------------------------------------------
# Tables
# ----------------------------------------------------------------------------------------------------


def table_of(title: str, rows: Sequence[Row]) -> Table:
    """All contenders; peaks and times are ratios to vanilla, "pred." is what the plan predicts of them."""
    columns = ("contender", "budget", "MiB", "peak", "highest", "pred.", "CPU", "min .. max", "wall", "pred.", "gap",
               "")  # fmt: skip
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if 0 < number < len(columns) - 1 else "left", no_wrap=True)
    vanilla = rows[0]
    for before, row in zip([vanilla, *rows], rows, strict=False):
        if before.kind != row.kind:
            table.add_section()
        table.add_row(*_cells(row, vanilla))
    return table


def _cells(row: Row, vanilla: Row) -> Iterator[str]:
    yield row.name
    yield "" if row.allowed_bytes is None else f"{row.allowed_bytes / vanilla.peak_bytes:.3f}"
    if row.least_bytes is not None:
        least_bytes = row.least_bytes - (row.budget_bytes or 0) + (row.allowed_bytes or 0)
        yield from ("",) * 9
        yield f"infeasible: {least_bytes / vanilla.peak_bytes:.3f}"
        return
    yield f"{row.peak_bytes / 2**20:,.2f}"
    yield f"{row.peak_bytes / vanilla.peak_bytes:.3f}"
    yield f"{row.highest_bytes / vanilla.peak_bytes:.3f}"
    yield "" if row.predicted is None else f"{predicted_bytes(row) / vanilla.peak_bytes:.3f}"
    unit_s = median(vanilla.cpu_s)
    yield f"{row.ratio(vanilla, 'cpu'):.3f}"
    yield f"{min(row.cpu_s) / unit_s:.2f} .. {max(row.cpu_s) / unit_s:.2f}"
    yield f"{row.ratio(vanilla, 'wall'):.3f}"
    yield "" if row.predicted is None else f"{predicted_ratio(row):.3f}"
    yield "" if row.predicted is None else f"{row.predicted['gap']:.2%}"
    notes = {"buffers twice": not row.keeps_buffers, "replanned": row.replanned, "warned": row.complaints}
    yield ", ".join(note for note, holds in notes.items() if holds)


def main() -> int:
    """Exit code 0; 1 if gradients differ or a promise is broken."""
    options = _options()
    sizes = QUICK[options.work] if options.quick else {}
    work = getattr(works, options.work)(**sizes, **({"in_place": True} if options.in_place else {}))
    found = foundation.machine()
    try:
        rows = measure(
            work,
            n_budgets=options.budgets,
            n_settling=6,
            n_rounds=options.rounds or (3 if options.quick else 7),
            least_round_s=0.0 if options.quick else 0.5,
            with_plans=not options.peers_only,
        )
    except foundation.UnequalError as error:
        print(f"not equal: {error}", file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else 164)
    console.print(table_of(f"{work.name}{' (quick)' if options.quick else ''}, {len(rows[0].cpu_s)} rounds", rows))
    noise = rows[1].ratio(rows[0], options.clock) - 1
    console.print(f"vanilla again: {noise:+.1%} ({options.clock}); that much is noise", highlight=False)
    console.print(", ".join(f"{key} {value}" for key, value in found.items()), highlight=False, soft_wrap=True)
    judged = [] if options.peers_only else checks(rows, options.clock)
    for check in judged:
        console.print(
            f"{'PASS' if check.kept else 'FAIL'}  {check.promise}: {check.numbers}", highlight=False, soft_wrap=True
        )
    if options.json:
        tree = {
            "work": work.name, "sizes": sizes, "clock": options.clock, "machine": found,
            "rows": [asdict(row) for row in rows], "checks": [asdict(check) for check in judged],
        }  # fmt: skip
        options.json.write_text(json.dumps(tree, indent=1) + "\n")
    return 0 if all(check.kept for check in judged) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", choices=QUICK)
    parser.add_argument("--in-place", action="store_true", help="conv: ReLU and the residual sum write in place")
    parser.add_argument("--quick", action="store_true", help="a small variant of the work, in seconds: a smoke run")
    parser.add_argument("--rounds", type=int, help="timed rounds (default: 7; quick: 3)")
    parser.add_argument(
        "--budgets", type=int, help="from the least to vanilla's peak, at least 2 (default: 10; quick: 4)"
    )
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="the time that the checks judge")
    parser.add_argument("--peers-only", action="store_true", help="no plans, and nothing judged")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    options = parser.parse_args()
    if options.in_place and options.work != "conv":
        parser.error("--in-place is for conv")
    if options.budgets is None:
        options.budgets = 4 if options.quick else 10
    if options.budgets < 2:
        parser.error("--budgets must be at least 2")
    return options


if __name__ == "__main__":
    sys.exit(main())
