"""What a run leaves on disk: ``<out-dir>/<run-name>/{config.json, metrics.jsonl, summary.json}``, with a
budget also ``plan.json``."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch

from elbowroom.errors import UsageError
from elbowroom.planning.plan import Plan
from elbowroom.training.config import TrainConfig


class RunDirectory:
    """The folder of one run, used in a ``with`` block. Each line of ``metrics.jsonl`` is a JSON object."""

    def __init__(self, config: TrainConfig) -> None:
        """Makes the folder. Raises UsageError if it holds a run already or cannot be made."""
        out_dir = config.run.out_dir
        self.path = out_dir / (config.run.run_name or _unused_name(out_dir))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if (self.path / "config.json").exists():
                raise UsageError(f"{self.path} holds a run already; choose another --run-name or --out-dir")
            self._metrics: TextIO = (self.path / "metrics.jsonl").open("w")
        except OSError as error:
            raise UsageError(f"cannot write the run to {self.path}: {error.strerror}") from error
        self._write("config.json", {"config": dataclasses.asdict(config), "versions": _versions()})

    def log(self, step: int, scalars: dict[str, float]) -> None:
        """Appends one line: the step and these scalars by their tags."""
        self._metrics.write(json.dumps({"step": step} | scalars, allow_nan=False) + "\n")
        self._metrics.flush()

    def keep_plan(self, plan: Plan) -> None:
        """Writes ``plan.json``."""
        (self.path / "plan.json").write_text(plan.to_json() + "\n")

    def summarise(self, summary: dict[str, Any]) -> None:
        """Writes ``summary.json``."""
        self._write("summary.json", summary)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.close()

    def _write(self, name: str, content: dict[str, Any]) -> None:
        (self.path / name).write_text(json.dumps(content, indent=2, default=str, allow_nan=False) + "\n")


def _unused_name(out_dir: Path) -> str:
    """Date and time; a number behind it where two runs start in one second."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    names = (now if number == 1 else f"{now}-{number}" for number in range(1, 1000))
    return next(name for name in names if not (out_dir / name).exists())


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {
        "elbowroom": version("elbowroom"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
