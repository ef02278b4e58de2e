"""What a run leaves on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from elbowroom.errors import UsageError
from elbowroom.training.config import TrainConfig
from elbowroom.training.records import RunDirectory

Configured = Callable[..., TrainConfig]


def test_lines_are_on_disk_as_soon_as_they_are_logged(configured: Configured) -> None:
    with RunDirectory(configured()) as records:
        records.log(3, {"train/loss": 0.1})
        (line,) = (records.path / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line) == {"step": 3, "train/loss": 0.1}
        assert not (records.path / "summary.json").exists()
        records.summarise({"steps": 3})
        assert json.loads((records.path / "summary.json").read_text()) == {"steps": 3}


def test_runs_without_a_name_get_one_of_their_own(configured: Configured, tmp_path: Path) -> None:
    paths = set()
    for _ in range(3):
        with RunDirectory(configured(run_name=None)) as records:
            paths.add(records.path)
    assert len(paths) == 3
    assert {path.parent for path in paths} == {tmp_path / "runs"}


def test_a_folder_that_cannot_be_made_is_named(configured: Configured, tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("")
    with pytest.raises(UsageError, match=r"^cannot write the run to .*blocked/run: Not a directory$"):
        RunDirectory(configured(out_dir=tmp_path / "blocked"))
