"""The tree of settings: no nonsense gets in, and the command line knows the presets there are."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args

import pytest

from elbowroom.errors import UsageError
from elbowroom.models.gpt import PRESETS
from elbowroom.training.config import (
    CheckConfig,
    MemoryConfig,
    PlanConfig,
    Preset,
    TrainConfig,
    checked_comparison,
    checked_planning,
    checked_run,
)


def test_presets_on_the_command_line_are_those_of_the_model() -> None:
    assert list(get_args(Preset)) == list(PRESETS)


def test_defaults_are_accepted() -> None:
    assert checked_run(TrainConfig()) == TrainConfig()
    assert checked_comparison(CheckConfig()) == CheckConfig()
    assert checked_planning(PlanConfig()) == PlanConfig()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": 0}, "--max-steps 0: must be at least 1"),
        ({"micro_batch_size": -2}, "--micro-batch-size -2: must be at least 1"),
        ({"sequence_length": 0}, "--sequence-length 0: must be at least 1"),
        ({"learning_rate": math.nan}, "--learning-rate nan: must be at least 0"),
        ({"log_every": 0}, "--log-every 0: must be at least 1"),
        ({"eval_every": -1}, "--eval-every -1: must be at least 0"),
        ({"seed": -1}, "--seed -1: must be at least 0"),
        ({"dropout": 1.0}, "--dropout 1.0: must be at least 0 and less than 1"),
        ({"run_name": "a/b"}, "--run-name 'a/b': must be a plain folder name; folders go into --out-dir"),
        (
            {"budget": "1GiB", "activation_checkpointing": "none"},
            "--budget 1GiB and --activation-checkpointing none contradict each other: with a budget a plan decides "
            "what each block keeps; leave out one of the two",
        ),
        (
            {"budget": "max", "keep": "nothing"},
            "--budget max and --keep nothing contradict each other: with a budget a plan decides what each block keeps"
            "; leave out one of the two",
        ),
        ({"run_name": ""}, "--run-name '': must be a plain folder name; folders go into --out-dir"),
    ],
)
def test_nonsense_is_named_by_its_flag(
    configured: Callable[..., TrainConfig], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        checked_run(configured(**changes))
    assert str(caught.value) == message


def test_nonsense_in_a_check_is_named_by_its_flag() -> None:
    with pytest.raises(UsageError, match=r"^--steps 0: must be at least 1$"):
        checked_comparison(CheckConfig(steps=0))


def test_nonsense_in_a_planning_is_named_by_its_flag() -> None:
    with pytest.raises(UsageError, match=r"^--points 1: must be at least 2$"):
        checked_planning(PlanConfig(points=1))


@pytest.mark.parametrize(
    ("memory", "mode", "policy"),
    [
        (MemoryConfig(), "full", "nothing"),
        (MemoryConfig(keep="matmuls"), "full", "matmuls"),
        (MemoryConfig(activation_checkpointing="full", keep="attention"), "full", "attention"),
        (MemoryConfig(activation_checkpointing="none"), "none", "nothing"),
        (MemoryConfig(budget="85%"), "planned", None),
    ],
)
def test_auto_is_full_without_a_budget_and_planned_with(memory: MemoryConfig, mode: str, policy: str | None) -> None:
    assert (memory.mode, memory.policy) == (mode, policy)


def test_settings_load_without_the_model() -> None:
    """What --help needs must not wait for torch; the package itself is left out of the question here."""
    program = (
        "import sys, types\n"
        "import importlib.util\n"
        "package = types.ModuleType('elbowroom')\n"
        "package.__path__ = list(importlib.util.find_spec('elbowroom').submodule_search_locations)\n"
        "sys.modules['elbowroom'] = package\n"
        "import elbowroom.cli\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
