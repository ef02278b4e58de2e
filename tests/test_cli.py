"""The command line as a user meets it: exit codes, what is printed where, and one line for what is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elbowroom.cli import main
from elbowroom.training import check as checking

SMALL = ["--max-steps", "4", "--micro-batch-size", "2", "--sequence-length", "32", "--log-every", "1"]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text.txt"
    path.write_text("All work and no play makes Jack a dull boy.\n" * 500)
    return path


def run_here(*arguments: str) -> int:
    """The command in this process: its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """The command in a process of its own, as ``python -m elbowroom``."""
    return subprocess.Popen(
        [sys.executable, "-m", "elbowroom", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


# ---------------------------------------------------------------------------------------------- train


def test_train_from_a_shell_prints_a_table_and_leaves_stderr_to_progress(text: Path, tmp_path: Path) -> None:
    process = start("train", "--data", str(text), "--run-name", "one", *SMALL, cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    for words in (
        "peak of one step, without checkpointing",
        "peak of one step, with",
        "validation loss at end",
    ):
        assert words in out
    assert "runs/one" in out
    assert "step 4/4  loss" in err
    assert "loss " not in out.replace("validation loss", "")
    # Nothing of torch's own (profiler, allocator) is among the lines.
    assert all(line.startswith(("step ", "validation loss ", "measuring ")) for line in err.splitlines()), err
    assert sorted(file.name for file in (tmp_path / "runs" / "one").iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "summary.json",
    ]


def test_train_json_is_one_object_and_nothing_else(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(text), "--run-name", "one", "--json", "--gradient-checkpointing", "none", *SMALL]
    assert run_here("train", *flags) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary["command"] == "train"
    assert summary["activation_checkpointing"] == "none"
    assert summary["steps"] == 4
    assert summary["step_cost"]["plain"]["peak_bytes"] > 0
    assert "step 4/4" in err


def test_ctrl_c_prints_the_table_and_exits_130(text: Path, tmp_path: Path) -> None:
    flags = ["--data", str(text), "--run-name", "one", *SMALL, "--max-steps", "100000"]
    process = start("train", *flags, cwd=tmp_path)
    metrics = tmp_path / "runs" / "one" / "metrics.jsonl"
    deadline_s = time.monotonic() + 90
    while not (metrics.exists() and "train/loss" in metrics.read_text()):
        assert time.monotonic() < deadline_s
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "of 100000 (interrupted)" in out
    assert "stopping after this step (Ctrl-C again: at once)" in err
    assert "Traceback" not in err
    summary = json.loads((tmp_path / "runs" / "one" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["steps"] >= 1


def test_train_with_a_budget_shows_need_plan_and_what_was_measured(text: Path, tmp_path: Path) -> None:
    flags = ["--data", str(text), "--run-name", "one", *SMALL, "--budget", "max"]
    process = start("train", *flags, cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    for words in (
        "peak of one step without a plan, predicted",
        "peak of one step, predicted",
        "peak of one step, measured",
        "extra time, predicted",
        "extra time, measured",
    ):
        assert words in out
    assert "without help one step would take " in err
    assert "blocks.0" in err
    assert "Traceback" not in err


def test_a_budget_too_small_is_one_line_and_exit_2(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("train", "--data", str(text), *SMALL, "--budget", "1MiB") == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("elbowroom: a budget of 1.0 MiB (1048576 bytes) was asked for; the least that this step ")
    assert "step 3/4" not in err


# ---------------------------------------------------------------------------------------------- plan


USERS_STACK = """
import torch
from torch import nn
def block(): return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
def build():
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(4))), torch.randn(128, 8)
"""


def test_plan_from_a_shell_prints_the_table_and_writes_plan_and_picture(tmp_path: Path) -> None:
    (tmp_path / "stack_of_a_user.py").write_text(USERS_STACK)
    process = start("plan", "--model", "stack_of_a_user.py:build", "--points", "3", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "→" in out
    assert "keep all" in out
    assert "written: plan.json, plan.png" in out
    assert err.splitlines() == ["running one step, recorded and measured", "planning for 3 budgets"]
    assert json.loads((tmp_path / "plan.json").read_text())["decisions"][0]["region"] == "0"
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_plan_json_is_one_object(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text.parent / "stack_for_json.py").write_text(USERS_STACK)
    flags = ["--model", "stack_for_json.py:build", "--points", "2", "--plan-file", "a.json", "--picture", "a.png"]
    code = run_here("plan", *flags, "--json")
    sys.path.remove(str(text.parent))
    result = json.loads(capsys.readouterr().out)
    assert (code, result["command"], result["plan_file"], result["picture"]) == (0, "plan", "a.json", "a.png")
    assert result["front"]["least_bytes"] <= result["chosen"]["peak_bytes"] <= result["front"]["plain_peak_bytes"]
    assert {"name", "peak_bytes", "step_s", "replayed"} <= set(result["front"]["baselines"][0])


# ---------------------------------------------------------------------------------------------- check


def test_check_from_a_shell_exits_0_and_says_equal(tmp_path: Path) -> None:
    process = start("check", "--sequence-length", "64", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "equal, bit for bit" in out
    assert "yes" in out
    assert err.splitlines() == [
        "comparing step 1 of 3",
        "comparing step 2 of 3",
        "comparing step 3 of 3",
        "measuring one step of each",
    ]


def test_check_exits_1_and_names_the_difference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checking.wrap

    def faulty_wrap(module: Any, **options: Any) -> Any:
        module.mlp.fc.bias.register_hook(lambda gradient: gradient * 2)
        return real(module, **options)

    monkeypatch.setattr(checking, "wrap", faulty_wrap)
    assert run_here("check", "--sequence-length", "16", "--json") == 1
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (result["command"], result["equal"]) == ("check", False)
    assert result["first_difference"].startswith("step 1: gradient of blocks.0.mlp.fc.bias differs: ")
    assert err.splitlines()[-1] == f"not equal: {result['first_difference']}"


def test_check_takes_a_users_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "users_model_for_cli.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)), torch.randn(8, 4)\n"
    )
    code = run_here("check", "--model", f"{path}:build", "--json")
    sys.path.remove(str(tmp_path))
    result = json.loads(capsys.readouterr().out)
    assert (code, result["equal"], result["n_regions"], result["n_gradients"]) == (0, True, 3, 4)


# ---------------------------------------------------------------------------------------------- wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--data", "missing"], "elbowroom: --data missing: no such file or folder"),
        (
            ["train", "--data", "empty.txt"],
            "elbowroom: --data empty.txt: empty, there is nothing to learn from",
        ),
        (["train", "--max-steps", "0"], "elbowroom: --max-steps 0: must be at least 1"),
        (
            ["train", "--data", "text.txt", "--sequence-length", "20000"],
            "elbowroom: --sequence-length 20000 needs at least 40002 tokens (one sequence to train on, one "
            "to validate), but text.txt has 22001; shorten it or give more text",
        ),
        (
            ["train", "--budget", "1GiB", "--activation-checkpointing", "full"],
            "elbowroom: --budget 1GiB and --activation-checkpointing full contradict each other: with a budget a plan "
            "decides what each block keeps; leave out one of the two",
        ),
        (["plan", "--model", "nothing.py:f"], "elbowroom: --model nothing.py:f: no file nothing.py"),
        (["plan", "--points", "1"], "elbowroom: --points 1: must be at least 2"),
        (["check", "--model", "nothing.py:f"], "elbowroom: --model nothing.py:f: no file nothing.py"),
        (["check", "--steps", "0"], "elbowroom: --steps 0: must be at least 1"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_2(
    text: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (text.parent / "empty.txt").write_text("")
    assert run_here(*arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", message + "\n")


def test_bad_input_from_a_shell_has_no_traceback(tmp_path: Path) -> None:
    process = start("train", "--device", "cuda:77", cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("elbowroom: --device cuda:77: cannot be used here: ")
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_no_number_exits_1(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--data",
        str(text),
        *SMALL,
        "--learning-rate",
        "1e30",
        "--gradient-clip",
        "1e30",
        "--warmup-steps",
        "0",
    ]
    assert run_here("train", *flags) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("elbowroom: the training loss is nan after ")


@pytest.mark.parametrize("arguments", [["train", "--nonsense"], ["train", "--precision", "fp8"], ["fly"], []])
def test_unknown_flags_and_commands_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(*arguments) == 2
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", ["train", "plan", "check"])
def test_every_flag_has_a_help_text_and_its_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(command, "--help") == 0
    text = " ".join(line.strip("│╭╰─╯ ") for line in capsys.readouterr().out.splitlines())
    # An alias follows its flag after a comma; "(default: " ends what belongs to a flag.
    flags = [flag for flag in re.split(r"(?<!,) (?=--[a-z])", text) if flag.startswith("--") and "--help" not in flag]
    assert len(flags) >= 10
    for part in flags:
        # A flag, its kind of value, words about it, its default.
        assert "(default: " in part, part
        assert len(part.split("(default: ")[0].split()) >= 4, part


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("--help") == 0
    out = capsys.readouterr().out
    assert "train" in out
    assert "plan" in out
    assert "check" in out
