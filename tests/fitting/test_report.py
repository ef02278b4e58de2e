"""The report of a fitted model: its numbers are those of the plan, the programs and the meter, and it prints them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import elbowroom
from elbowroom.errors import UsageError
from elbowroom.fitting.fit import fitting_of, profile
from elbowroom.fitting.planned import Planned
from elbowroom.fitting.report import Report, _largest
from elbowroom.planning.plan import Plan
from elbowroom.units import format_bytes, format_seconds
from tests.fitting.trainees import Block, Net, batch

pytestmark = pytest.mark.usefixtures("few_objects")

N_BLOCKS, DIM, N_SEQUENCES, N_TOKENS = 6, 64, 8, 32
UP_BYTES = N_SEQUENCES * N_TOKENS * 4 * DIM * 4  # what a block's first layer makes, float32


def inputs() -> Tensor:
    return batch(N_SEQUENCES, N_TOKENS, DIM)


def steps(model: nn.Module, n_steps: int, x: Tensor | None = None) -> None:
    x = inputs() if x is None else x
    for _ in range(n_steps):
        model.zero_grad()
        model(x).square().mean().backward()


def half_fitted(n_steps: int) -> tuple[nn.Module, Report, Plan, Planned]:
    """A model under a budget halfway between its least and what it takes plainly, so that its blocks differ."""
    model, x = Net(N_BLOCKS, DIM), inputs()
    elbowroom.fit(model, "1TiB")
    steps(model, 1, x)
    prof = profile(model)
    assert prof is not None
    elbowroom.fit(model, prof.resting_bytes + N_BLOCKS * 2 * UP_BYTES)
    steps(model, n_steps, x)
    report, fitting = elbowroom.report(model), fitting_of(model)
    assert fitting is not None
    assert fitting.last is not None
    assert report.plan is not None
    return model, report, report.plan, fitting.last


def test_rows_have_the_numbers_of_the_plan() -> None:
    _, report, plan, planned = half_fitted(3)
    assert len(report.rows) >= 2
    assert sum(row.n_calls for row in report.rows) == len(plan.decisions) == N_BLOCKS
    number = 0
    for row in report.rows:
        decided = plan.decisions[number : number + row.n_calls]
        root = planned.roots[planned.profile.calls[number].program]
        number += row.n_calls
        names = [f"blocks.{i}" for i in range(number - row.n_calls, number)]
        assert row.regions == (names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}")
        for d in decided:
            expected = (d.plain, d.kept_bytes, d.replayed, d.extra_s)
            assert (row.plain, row.kept_bytes, row.n_replayed, row.extra_s) == expected
        assert row.n_operators == row.n_proved == len(root.ops)
        assert row.opaque_bytes == 0
    assert any(row.plain and row.n_replayed == 0 for row in report.rows)
    assert any(not row.plain and row.n_replayed > 0 for row in report.rows)


def test_the_largest_value_is_named_with_its_operator_its_place_and_what_becomes_of_it() -> None:
    _, report, plan, planned = half_fitted(3)
    root = planned.roots[0]
    (up,) = (
        op.outputs[0] for op in root.ops
        if str(op.func) == "aten.addmm.default" and root.values[op.outputs[0]].nbytes == UP_BYTES
    )  # fmt: skip
    done = set()
    for row, (_, calls) in zip(report.rows, plan.groups(), strict=True):
        expected = "kept" if row.plain or up in calls[0].keep else "replayed"
        done.add(expected)
        assert row.largest.startswith(f"{format_bytes(UP_BYTES)} of aten.addmm.default ({expected}), ")
        assert "fitting/trainees.py:" in row.largest
    assert done == {"kept", "replayed"}
    text = f"{format_bytes(UP_BYTES)} of aten.addmm.default"
    assert _largest(root, frozenset({up}), plain=False).startswith(f"{text} (kept), ")
    assert _largest(root, frozenset(), plain=False).startswith(f"{text} (replayed), ")


def test_each_row_counts_the_operators_of_its_own_program() -> None:
    model = elbowroom.fit(nn.Sequential(Block(heads=2), Block(heads=2), Block(), Block()), "1TiB")
    steps(model, 2, batch())
    fitting = fitting_of(model)
    assert fitting is not None
    assert fitting.last is not None
    n_operators = [row.n_operators for row in elbowroom.report(model).rows for _ in range(row.n_calls)]
    assert n_operators == [len(fitting.last.roots[call.program].ops) for call in fitting.last.profile.calls]
    assert n_operators[0] == n_operators[1] > n_operators[2] == n_operators[3]


def test_predictions_are_the_plans_and_measurements_the_meters() -> None:
    model, report, plan, planned = half_fitted(7)
    told = plan.predicted
    assert report.budget_bytes == plan.budget_bytes
    assert (report.predicted_peak_bytes, report.predicted_step_s) == (told.peak_bytes, told.step_s)
    assert (report.plain_peak_bytes, report.plain_step_s) == (told.plain_peak_bytes, told.plain_step_s)
    assert told.plain_peak_bytes > report.budget_bytes >= told.peak_bytes
    x = inputs()
    steps(model, 1, x)
    model.zero_grad()
    with elbowroom.Meter() as meter:
        model(x).square().mean().backward()
    assert report.measured_peak_bytes == pytest.approx(meter.start_bytes + meter.peak_bytes, rel=0.02)
    assert report.measured_step_s is not None
    assert report.measured_step_s == planned.step_s
    assert report.measured_peak_bytes is not None
    assert report.resident_bytes > report.measured_peak_bytes


def test_nothing_is_said_to_be_measured_before_it_is() -> None:
    model, report, plan, _ = half_fitted(2)  # the second step, first of the plan, was metered and for that not timed
    assert report.measured_peak_bytes is not None
    assert report.measured_step_s is None
    assert f"step   predicted {format_seconds(plan.predicted.step_s)}, measured not measured yet;" in str(report)
    steps(model, 5)
    assert elbowroom.report(model).measured_step_s is not None
    assert "not measured yet" not in str(elbowroom.report(model))


def test_it_prints_one_line_a_group_and_all_totals() -> None:
    _, report, plan, _ = half_fitted(7)
    lines = str(report).splitlines()
    assert lines[0].startswith("6 regions: blocks.0 ... blocks.5 (Block); outside them: enter, leave")
    assert lines[1].split()[:3] == ["regions", "calls", "kept"]
    rows = lines[2 : 2 + len(report.rows)]
    column = lines[1].index("largest value")
    for line, row in zip(rows, report.rows, strict=True):
        assert line.startswith(row.regions)
        assert line[column:] == row.largest
        assert ("all, " in line) == row.plain
        assert f"{row.n_replayed} of {row.n_operators}" in line
        assert format_bytes(row.kept_bytes) in line
        assert format_seconds(row.extra_s) in line
    budget, peak, step, resident = lines[2 + len(report.rows) :]
    told = plan.predicted
    assert report.measured_peak_bytes is not None
    assert report.measured_step_s is not None
    assert budget == (
        f"budget {format_bytes(report.budget_bytes)}; without checkpointing {format_bytes(told.plain_peak_bytes)}"
    )
    assert peak == (
        f"peak   predicted {format_bytes(told.peak_bytes)}, measured {format_bytes(report.measured_peak_bytes)}; "
        f"{told.where}"
    )
    assert step.startswith(
        f"step   predicted {format_seconds(told.step_s)}, measured {format_seconds(report.measured_step_s)}; "
    )
    assert resident == (f"resident set of the process {format_bytes(report.resident_bytes)}; 1 kind of steps planned")


def test_before_the_first_step_it_has_the_budget_and_no_numbers() -> None:
    model = elbowroom.fit(Net(), 3 * 2**30)
    report = elbowroom.report(model)
    assert report.plan is None
    assert report.rows == ()
    assert report.n_kinds == 0
    numbers = (report.predicted_peak_bytes, report.measured_peak_bytes, report.predicted_step_s, report.plain_step_s)
    assert numbers == (None, None, None, None)
    assert str(report).splitlines()[1].startswith("budget 3.0 GiB; no plan yet")


def test_kinds_are_counted_once_they_have_a_plan() -> None:
    model = elbowroom.fit(Net(), "1TiB")
    for n_sequences, n_kinds in [(4, 0), (4, 1), (3, 1), (3, 2), (4, 2)]:
        steps(model, 1, batch(n_sequences))
        assert elbowroom.report(model).n_kinds == n_kinds
    assert "2 kinds of steps planned" in str(elbowroom.report(model))


def test_what_cannot_be_replayed_is_shown_as_opaque() -> None:
    class Square(torch.autograd.Function):
        """Saves what no operator that we saw has made."""

        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            saved = torch.from_numpy(x.detach().numpy() * 2)
            ctx.save_for_backward(saved)  # type: ignore[attr-defined]
            return x.square()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            (saved,) = ctx.saved_tensors  # type: ignore[attr-defined]
            return grad * saved

    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return Square.apply(self.linear(x))  # type: ignore[no-untyped-call]

    model = elbowroom.fit(nn.Sequential(Opaque(), Opaque()), "1TiB")
    steps(model, 3, torch.randn(32, 16))
    rows = elbowroom.report(model).rows
    assert rows
    assert [row.opaque_bytes for row in rows] == [32 * 16 * 4] * len(rows)
    assert format_bytes(32 * 16 * 4) in str(elbowroom.report(model))


def test_a_model_that_is_not_fitted_has_no_report() -> None:
    with pytest.raises(UsageError, match=r"this Net is not fitted: call elbowroom\.fit"):
        elbowroom.report(Net())
