"""Reports: what plain autograd would keep, to the byte; what is proved, as counts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import elbowroom
from tests.core.counting import fresh


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_saved_bytes_of_a_block() -> None:
    block = Block()
    x = torch.randn(4, 8, requires_grad=True)
    report = elbowroom.saved(block, x)
    values = [(row.nbytes, row.shape, row.operator, row.source) for row in report if not row.parameter]
    assert values == [
        (4 * 32 * 4, (4, 32), "aten.addmm.default", False),  # gelu() saves its input
        (4 * 32 * 4, (4, 32), "aten.gelu.default", False),  # down() saves its input
        (4 * 8 * 4, (4, 8), "argument 0", True),  # norm() saves its input, the region's own
        (4 * 8 * 4, (4, 8), "aten.native_layer_norm.default", False),  # up() saves its input
        (4 * 4, (4, 1), "aten.native_layer_norm.default", False),  # mean
        (4 * 4, (4, 1), "aten.native_layer_norm.default", False),  # and reciprocal deviation
    ]
    assert report.total_bytes == 2 * 512 + 2 * 128 + 2 * 16
    assert {row.operator for row in report if row.parameter} == {
        "parameter 'norm.weight'", "parameter 'norm.bias'", "parameter 'up.weight'", "parameter 'down.weight'",
    }  # fmt: skip
    assert [row.nbytes for row in report] == sorted((row.nbytes for row in report), reverse=True)


def test_saved_says_module_line_and_dtype() -> None:
    report = elbowroom.saved(Block().double(), torch.randn(4, 8, dtype=torch.float64, requires_grad=True))
    rows = {row.operator: row for row in report}
    gelu, up = rows["aten.gelu.default"], rows["aten.addmm.default"]
    assert (gelu.module, up.module) == ("Block", "up")
    assert __file__ in gelu.line
    assert gelu.line.endswith("in forward")
    assert (gelu.dtype, gelu.nbytes) == (torch.float64, 4 * 32 * 8)


def test_saved_is_one_row_for_each_storage() -> None:
    report = elbowroom.saved(lambda x: (x.t() * x) + x * x[0], torch.randn(5, 5, requires_grad=True))
    assert [(row.nbytes, row.source) for row in report] == [(100, True)]
    assert (len(report), report.total_bytes) == (1, 100)


def test_saved_runs_the_function_once_and_leaves_no_program() -> None:
    calls = []

    def body(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (x * 2).sin()

    fn = fresh(body)
    elbowroom.saved(fn, torch.randn(3, requires_grad=True))
    assert calls == [1]
    assert elbowroom.proof(fn).programs == 0


def test_saved_of_nothing() -> None:
    report = elbowroom.saved(lambda x: x + 1, torch.randn(3))
    assert (list(report), report.total_bytes) == ([], 0)
    assert "0 B  kept for backward, parameters not counted" in str(report)


def test_saved_is_a_table() -> None:
    text = str(elbowroom.saved(Block(), torch.randn(4, 8, requires_grad=True)))
    lines = text.splitlines()
    assert lines[0].split() == ["bytes", "shape", "dtype", "operator", "module", "line"]
    assert "1.28 KiB" in lines[-1] or "1312 B" in lines[-1] or "1.3 KiB" in lines[-1]
    assert any("aten.gelu.default" in line and "[4, 32]" in line and "float32" in line for line in lines)


def test_proof_counts() -> None:
    fn = fresh(lambda x, w: (x @ w + 2).sin())
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    for _ in range(3):
        elbowroom.checkpoint(fn, x, w).sum().backward()
    found = elbowroom.proof(fn)
    assert (found.regions, found.programs, found.calls) == (1, 1, 3)
    assert (found.operators, found.proved) == (3, 3)
    assert found.replays == 3 * 2  # each time the product and the sum, for the input of sin()
    assert found.saved_bytes == 3 * 64  # x, w, and the input of sin()
    assert found.held_bytes == 2 * 64  # x and w
    assert found.kept == ()


def test_proof_of_a_model_is_of_all_wrapped_modules_in_it() -> None:
    model = nn.Sequential(*(elbowroom.wrap(Block()) for _ in range(3)), nn.Linear(8, 2))
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    found = elbowroom.proof(model)
    assert (found.regions, found.programs, found.calls) == (3, 1, 3)
    assert elbowroom.proof(model[0]).calls == 1
    # layer_norm, addmm, gelu, mm, add; replayed: layer_norm, addmm, gelu.
    assert (found.operators, found.proved, found.replays) == (5, 5, 3 * 3)


def test_proof_of_what_was_never_called() -> None:
    for target in (fresh(lambda x: x), nn.Linear(2, 2), elbowroom.wrap(nn.Linear(2, 2))):
        found = elbowroom.proof(target)
        assert (found.programs, found.calls, found.operators, found.proved, found.kept) == (0, 0, 0, 0, ())


def test_proof_is_text() -> None:
    fn = fresh(lambda x: (x * 2).sin())
    elbowroom.checkpoint(fn, torch.randn(4, requires_grad=True)).sum().backward()
    lines = str(elbowroom.proof(fn)).splitlines()
    assert lines[0] == "1 regions, 1 programs, 1 calls, 1 operators replayed"
    assert lines[1] == "2 of 2 operators proved bit for bit"
    assert len(lines) == 3
    assert "held per call where autograd would save" in lines[2]


def test_proof_reports_only_the_program_it_is_of() -> None:
    # A program that forks off before an opaque value does not report that value.
    def body(x: torch.Tensor, touch: bool) -> torch.Tensor:
        h = x * 2
        if touch:
            g = h.exp()
            g.detach().numpy()
            return (g + 1).sin()
        return h.sin()

    fn = fresh(body)
    x = torch.randn(4, requires_grad=True)
    elbowroom.checkpoint(fn, x, True).sum().backward()
    elbowroom.checkpoint(fn, x, False).sum().backward()
    from tests.core.counting import programs_of

    rows = sorted((len(p.ops), len(p.kept_rows)) for p in programs_of(fn))
    assert rows == [(2, 0), (4, 1)]
