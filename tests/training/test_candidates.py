"""Models given by file and function: what is accepted, and one line for what is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elbowroom.errors import UsageError
from elbowroom.training.candidates import candidate_builder, default_loss, seed_everything

MODELS = """
import torch
from dataclasses import dataclass
from torch import nn
from neighbour import WIDTH

class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)
    def forward(self, a, b):
        return self.layer(a + b)

@dataclass
class Settings:
    width: int = 4

def one(): return nn.Linear(4, 2), torch.ones(3, 4)
def several(): return Sum(), (torch.ones(3, 4), torch.ones(3, 4))
def named(): return Sum(), {"b": torch.ones(3, 4), "a": torch.zeros(3, 4)}
def with_loss(): return nn.Linear(4, 2), torch.ones(3, 4), lambda output: output.sum()
def three(): return 3
def wrong_pair(): return torch.ones(1), nn.Linear(4, 2)
def wrong_loss(): return nn.Linear(4, 2), torch.ones(3, 4), "mean"
def broken(): raise RuntimeError("no such\\nlayer")
number = 7
"""


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "neighbour.py").write_text("WIDTH = 4\n")
    path = tmp_path / "models_under_test.py"
    path.write_text(MODELS)
    before = list(sys.path)
    yield path
    sys.path[:] = before
    for name in ("neighbour", "models_under_test"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("function", ["one", "several", "named", "with_loss"])
def test_inputs_reach_the_model(models: Path, function: str) -> None:
    seed_everything(0)
    candidate = candidate_builder(f"{models}:{function}", batch_size=1, sequence_length=None)()
    output = candidate.forward()
    linear = candidate.model if function in ("one", "with_loss") else candidate.model.layer
    torch.testing.assert_close(output, linear(torch.ones(3, 4) * (2 if function == "several" else 1)))
    expected = output.sum() if function == "with_loss" else output.square().mean()
    torch.testing.assert_close(candidate.loss_fn(output), expected)


def test_presets_have_the_asked_dropout_and_shape() -> None:
    candidate = candidate_builder("tiny", batch_size=3, sequence_length=20, dropout=0.1)()
    assert candidate.model.config.dropout == 0.1  # type: ignore[union-attr]
    as_it_is = candidate_builder("tiny", batch_size=1, sequence_length=None)().model.config
    assert (as_it_is.dropout, as_it_is.sequence_length) == (0.0, 128)  # type: ignore[union-attr]
    logits, loss = candidate.forward()
    assert logits.shape == (3, 20, 256)
    assert candidate.loss_fn((logits, loss)) is loss


def test_the_default_loss_adds_the_mean_squares_of_what_has_gradients() -> None:
    with_gradients = torch.full((2, 2), 3.0, requires_grad=True)
    half = torch.full((4,), 2.0, dtype=torch.bfloat16, requires_grad=True)
    output = {
        "a": with_gradients,
        "b": [half, torch.full((5,), 100.0)],
        "c": torch.ones(2, dtype=torch.int64),
    }
    assert default_loss(output).item() == 9.0 + 4.0
    with pytest.raises(UsageError, match="holds no floating-point tensor with gradients; return a loss_fn as third"):
        default_loss(torch.ones(3))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("huge", r"--model huge: neither a preset \(tiny, small, .*gpt2-xl\) nor FILE.py:FUNCTION"),
        ("no/such.py:f", r"--model no/such.py:f: no file no/such.py"),
        ("{path}:missing", r"--model .*: .*models_under_test.py has no function named missing"),
        ("{path}:number", r"--model .*: .*models_under_test.py has no function named number"),
        ("{path}:three", r"--model .*: must return \(model, inputs\) or \(model, inputs, loss_fn\), got int"),
        ("{path}:wrong_pair", r"--model .*: must return .*, got \(Tensor, Linear\)"),
        ("{path}:wrong_loss", r"--model .*: must return .*, got \(Linear, Tensor, str\)"),
        ("{path}:broken", r"--model .*: the function failed: RuntimeError: no such"),
    ],
)
def test_what_cannot_be_used_is_named_in_one_line(models: Path, asked: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        candidate_builder(asked.format(path=models), batch_size=1, sequence_length=None)()


def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    path = tmp_path / "faulty_models.py"
    path.write_text("def f(:\n")
    with pytest.raises(UsageError, match=r"faulty_models\.py cannot be imported: SyntaxError: invalid syntax"):
        candidate_builder(f"{path}:f", batch_size=1, sequence_length=None)
    sys.path.remove(str(tmp_path))


def test_seeding_covers_python_numpy_and_torch() -> None:
    import random

    import numpy as np

    draws = []
    for _ in range(2):
        seed_everything(3)
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]
