"""Small runs on a small text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elbowroom.training import loop
from elbowroom.training.config import (
    DataConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text of 20 kB, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} times {number} is {number * number}\n" for number in range(1000)))
    return path


@pytest.fixture
def configured(text: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """``configured(max_steps=3, dropout=0.1, ...)``: a small run with these fields changed."""

    def configure(**changes: Any) -> TrainConfig:
        parts: dict[str, Any] = {
            "model": ModelConfig(sequence_length=32, dropout=0.1),
            "data": DataConfig(path=text, micro_batch_size=2),
            "optimizer": OptimizerConfig(warmup_steps=2),
            "memory": MemoryConfig(),
            "run": RunConfig(
                max_steps=6,
                out_dir=tmp_path / "runs",
                run_name="run",
                log_every=1,
                eval_batches=2,
                sample_tokens=8,
            ),
        }
        for name, part in parts.items():
            own = {field: changes.pop(field) for field in list(changes) if hasattr(part, field)}
            parts[name] = replace(part, **own)
        assert not changes, f"no such fields: {changes}"
        return TrainConfig(**parts)

    return configure


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the measurement at a run's end, for tests that look elsewhere."""
    monkeypatch.setattr(loop, "cost_of_a_step", lambda run: None)
