"""What a budget buys, for a real model: plan and pictures are written, numbers agree, and refusals come in words."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import elbowroom
from elbowroom.errors import InfeasibleBudgetError, UsageError
from elbowroom.planning.plan import Plan
from elbowroom.training.config import PlanConfig
from elbowroom.training.tradeoff import trade_off

MODELS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
    def forward(self, x):
        return x + self.down(self.up(x).tanh().sigmoid())

class Stack(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def stack(): return Stack(), torch.randn(256, 16)
def frozen(): return Stack().requires_grad_(False), torch.randn(256, 16)
def misfit(): return Stack(), torch.randn(256, 9)
"""
N_PARAMETERS = 4 * (16 * 64 + 64 + 64 * 16 + 16)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tradeoff_models.py"
    path.write_text(MODELS)
    before = list(sys.path)
    yield str(path)
    sys.path[:] = before
    sys.modules.pop("tradeoff_models", None)


def traded(model: str, **settings: Any) -> dict[str, Any]:
    return trade_off(PlanConfig(model=model, **{"points": 3} | settings), lambda text: None)


def test_plan_and_pictures_are_written_and_agree_with_what_is_returned(models: str) -> None:
    said: list[str] = []
    config = PlanConfig(model=f"{models}:stack", points=4, timeline=Path("course.png"))
    result = trade_off(config, said.append)
    front, chosen = result["front"], result["chosen"]
    assert len(front["plans"]) == 4
    assert front["n_calls"] == 4
    assert front["resting_bytes"] < front["least_bytes"] < front["plain_peak_bytes"]
    assert chosen["budget_bytes"] == (front["least_bytes"] + front["plain_peak_bytes"]) // 2
    assert chosen["peak_bytes"] <= chosen["budget_bytes"]
    plan = Plan.from_json(Path("plan.json").read_text())
    assert (plan.budget_bytes, plan.predicted.peak_bytes) == (chosen["budget_bytes"], chosen["peak_bytes"])
    assert [d.region for d in plan.decisions] == [f"blocks.{n}" for n in range(4)]
    for picture in ("plan.png", "course.png"):
        assert Path(picture).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert json.loads(json.dumps(result)) == json.loads(json.dumps(result, allow_nan=False))
    assert said == ["running one step, recorded and measured", "planning for 4 budgets"]


def test_fit_takes_the_plan_that_was_written(models: str) -> None:
    traded(f"{models}:stack")
    model, inputs = sys.modules["tradeoff_models"].stack()
    elbowroom.fit(model, plan="plan.json")
    for _ in range(2):
        model(inputs).square().mean().backward()
        model.zero_grad()
    assert elbowroom.plan(model) == Plan.from_json(Path("plan.json").read_text())
    elbowroom.unfit(model)


def test_the_budget_asked_for_is_the_plans(models: str) -> None:
    front = traded(f"{models}:stack")["front"]
    asked = front["least_bytes"] + (front["plain_peak_bytes"] - front["least_bytes"]) // 3
    result = traded(f"{models}:stack", budget=str(asked))
    assert Plan.from_json(Path("plan.json").read_text()).budget_bytes == asked
    assert result["chosen"]["budget_bytes"] == asked
    assert result["chosen"]["peak_bytes"] <= asked


def test_optimizer_state_rests(models: str) -> None:
    with_state, without = (
        traded(f"{models}:stack", optimizer=optimizer)["front"]["resting_bytes"] for optimizer in ("adamw", "none")
    )
    n_tensors = 16
    assert with_state - without == 2 * 4 * N_PARAMETERS + n_tensors * 4  # two moments, and a step counter each


def test_presets_are_those_of_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = traded("tiny", micro_batch_size=2, sequence_length=32, precision="bf16")
    assert result["title"] == "tiny: 2 sequences of 32 tokens, cpu, bf16"
    assert result["front"]["n_calls"] == 4
    operators = {d.program for d in Plan.from_json(Path("plan.json").read_text()).decisions}
    assert len(operators) == 1


def test_a_budget_that_no_plan_keeps_to_is_refused_and_nothing_is_written(models: str) -> None:
    least_bytes = traded(f"{models}:stack")["front"]["least_bytes"]
    with pytest.raises(InfeasibleBudgetError) as caught:
        traded(f"{models}:stack", budget="1KiB", plan_file=Path("other.json"), picture=Path("other.png"))
    assert (caught.value.budget_bytes, caught.value.least_bytes) == (1024, least_bytes)
    assert not list(Path().glob("other.*"))


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        ("misfit", {}, "its step fails: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("frozen", {}, "no parameter of the model takes gradients: there is no step to plan"),
        ("stack", {"plan_file": Path("no/a.json")}, "--plan-file no/a.json: there is no folder no; make it first"),
        ("stack", {"picture": Path(".")}, "--picture .: is a folder; give the name of a file"),
        ("stack", {"budget": "much"}, "much"),
    ],
)
def test_what_cannot_be_planned_is_named(models: str, function: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        traded(f"{models}:{function}", **settings)
    assert message in str(caught.value)
    assert not Path("plan.json").exists()


def test_planning_moves_no_weight(models: str) -> None:
    sys.path.insert(0, str(Path(models).parent))
    Path("seen_models.py").write_text(
        "from tradeoff_models import stack\nbuilt = []\ndef build():\n    built.append(stack())\n    return built[-1]\n"
    )
    traded("seen_models.py:build")
    ((model, _),) = sys.modules.pop("seen_models").built
    torch.manual_seed(0)
    fresh, _ = sys.modules["tradeoff_models"].stack()
    for ours, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(ours, theirs)
