"""The sanity check finds nothing where nothing differs, and names what does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elbowroom.errors import UsageError
from elbowroom.training import check as checking
from elbowroom.training.check import check, first_difference
from elbowroom.training.config import CheckConfig

MODELS = """
import itertools, random
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
    def forward(self, x):
        return x + self.drop(self.norm(self.linear(x)).relu()) * random.random()

class Stack(nn.Module):
    def __init__(self, n=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(n))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def stack(): return Stack(), torch.randn(16, 8, requires_grad=True)
calls = itertools.count()
def unseeded(): return Stack(), torch.full((16, 8), float(next(calls)))
shared = Stack()
def same(): return shared, torch.randn(16, 8)
def frozen(): return Stack().requires_grad_(False), torch.randn(16, 8)
def misfit(): return Stack(), torch.randn(16, 9)
"""


@pytest.fixture
def models(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "check_models.py"
    path.write_text(MODELS)
    before = list(sys.path)
    yield str(path)
    sys.path[:] = before
    sys.modules.pop("check_models", None)


def checked(**settings: Any) -> dict[str, Any]:
    return check(CheckConfig(**settings), lambda text: None)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("keep", ["nothing", "matmuls"])
def test_a_gpt_with_dropout_is_equal(precision: Any, keep: Any) -> None:
    result = checked(precision=precision, keep=keep, sequence_length=64)
    assert result["equal"], result["first_difference"]
    assert result["first_difference"] is None
    assert (result["steps"], result["n_regions"], result["n_buffers"]) == (3, 4, 0)
    # 12 parameters a block, token table (the head's too) and last norm.
    assert result["n_gradients"] == 4 * 12 + 1 + 2
    cost = result["step_cost"]
    assert cost["checkpointed"]["peak_bytes"] < cost["plain"]["peak_bytes"]
    assert result["proof"]["operators"] >= result["proof"]["proved"] > 0


@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_a_users_model_is_equal(models: str, verify: Any) -> None:
    result = checked(model=f"{models}:stack", verify=verify, steps=4)
    assert result["equal"], result["first_difference"]
    assert result["n_gradients"] == 3 * 4 + 1  # the input's too
    assert result["n_buffers"] == 3 * 3
    assert result["n_regions"] == 3


def spoiling(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    """The engine with a fault: after ``wrap``, ``spoil`` is done to the region."""
    real = checking.wrap

    def faulty_wrap(module: nn.Module, **options: Any) -> nn.Module:
        module = real(module, **options)
        spoil(module)
        return module

    monkeypatch.setattr(checking, "wrap", faulty_wrap)


def test_one_wrong_gradient_is_named_with_its_size(models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def spoil(module: nn.Module) -> None:
        if not done:
            done.append(module.linear.bias.register_hook(lambda grad: grad + torch.tensor([0.5] + [0.0] * 7)))

    spoiling(monkeypatch, spoil)
    result = checked(model=f"{models}:stack")
    assert not result["equal"]
    assert result["first_difference"] == (
        "step 1: gradient of blocks.0.linear.bias differs: 1 of 8 elements, by 0.5 at most"
    )
    assert (result["steps"], result["step_cost"]) == (1, None)


def test_a_buffer_written_twice_is_named(models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(module: nn.Module) -> None:
        module.register_forward_hook(lambda module, *_: module.norm.num_batches_tracked.add_(1) and None)

    spoiling(monkeypatch, spoil)
    difference = checked(model=f"{models}:stack")["first_difference"]
    assert difference == "step 1: buffer blocks.0.norm.num_batches_tracked differs: 1 of 1 elements, by 1 at most"


def test_a_random_stream_that_moved_is_named(models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(module: nn.Module) -> None:
        module.register_full_backward_hook(lambda *_: torch.rand(1) and None)

    spoiling(monkeypatch, spoil)
    difference = checked(model=f"{models}:stack")["first_difference"]
    assert difference.startswith("step 1: generator of torch differs: ")


def test_a_failure_of_the_checkpointed_step_only_is_a_difference(models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(module: nn.Module) -> None:
        module.register_forward_hook(lambda *_: 1 / 0)

    spoiling(monkeypatch, spoil)
    result = checked(model=f"{models}:stack")
    assert result["first_difference"] == (
        "step 1: only the checkpointed step fails: ZeroDivisionError: division by zero"
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "unseeded",
            "two calls with the same seeds built different models or inputs; draw only from torch, ",
        ),
        ("same", "two calls returned the same model; build it inside the function$"),
        ("frozen", "no parameter of the model takes gradients: nothing to check$"),
        ("misfit", "fails already when plain: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_what_cannot_be_checked_is_named(models: str, function: str, message: str) -> None:
    with pytest.raises(UsageError, match=rf"^--model .*check_models\.py:{function}: {message}"):
        checked(model=f"{models}:{function}")


@pytest.mark.parametrize(
    ("wanted", "found", "message"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), None),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), None),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "x differs: 1 of 1 elements, by 0 at most"),
        (
            torch.ones(3),
            torch.ones(3) + torch.tensor([0, 0, 1e-3]),
            "x differs: 1 of 3 elements, by 0.001 at most",
        ),
        (
            torch.ones(3),
            torch.ones(2, dtype=torch.int32),
            "x differs: torch.float32 (3,) when plain, torch.int32 (2,) when checkpointed",
        ),
        (torch.tensor([2j]), torch.tensor([5j]), "x differs: 1 of 1 elements, by 3 at most"),
        (torch.ones(3), None, "x differs: torch.float32 (3,) when plain, none when checkpointed"),
        (None, torch.ones(3), "x differs: none when plain, torch.float32 (3,) when checkpointed"),
        (None, None, None),
        (torch.empty(0, 3), torch.empty(0, 3), None),
        ((3, 1), (3, 2), "x differs: the random stream stands elsewhere"),
    ],
)
def test_differences_in_words(wanted: Any, found: Any, message: str | None) -> None:
    assert first_difference({"x": wanted}, {"x": found}) == message


def test_what_is_missing_or_extra_is_named() -> None:
    one = torch.ones(1)
    assert first_difference({"x": one}, {}) == "x is missing in the checkpointed run"
    assert first_difference({}, {"x": one}) == "x is there in the checkpointed run only"
