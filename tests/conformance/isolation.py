"""A process for each test that needs one: memory figures, the garbage collector, process groups, crashes.

Starting an interpreter and importing torch takes seconds, so one server process imports it and forks a child per
request. The server never runs autograd itself, so its children start clean. A child that dies (a segmentation fault,
an abort) is reported by its signal; it takes no other test with it.

    python -m tests.conformance.isolation        # reads requests from stdin, one JSON object per line
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).parent / "cases"


class CaseServer:
    """The client's end: ``run()`` gives {"status": "ok" | "fail" | "error", "message", "raised", "wall_s"}."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, target: str, contender: str, *, timeout_s: float = 120.0) -> dict[str, Any]:
        """Run ``target`` ("case:NAME" or "module:function") in a child of its own, with the contender of that name."""
        if self._process is None:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.conformance.isolation"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"target": target, "contender": contender, "timeout_s": timeout_s}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the case server ended with {self._process.poll()} while it ran {target}"
        result: dict[str, Any] = json.loads(answer)
        return result

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=10)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


def load_case(name: str) -> Any:
    spec = importlib.util.spec_from_file_location("conformance_case", CASES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["conformance_case"] = module  # pickle looks classes up by module name
    spec.loader.exec_module(module)
    return module


def run_here(target: str, contender_name: str) -> dict[str, Any]:
    """Run one target in this process. ``raised`` names the classes of an error that the case accepted as right."""
    import torch

    from tests.conformance import contenders

    torch.set_num_threads(1)
    raised: list[list[str]] = []
    contender = contenders.contender(contender_name)
    where, name = target.split(":")
    try:
        if where == "case":
            module = load_case(name)
            _note_accepted_errors(module, raised)
            run = module.run
        else:
            run = getattr(importlib.import_module(where), name)
        run(contender)
        status, message = "ok", ""
    except AssertionError as error:
        status, message = "fail", str(error) or traceback.format_exc(limit=-2)
    except BaseException as error:
        status, message = "error", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"
    return {"status": status, "message": message, "raised": raised[0] if raised else None}


def _note_accepted_errors(module: Any, raised: list[list[str]]) -> None:
    """Make the case's ``right_or_clear`` say which error class it was given, if it was given one."""
    accept = module.right_or_clear

    def right_or_clear(what: str, fn: Any, *args: Any, **kwargs: Any) -> None:
        def watched() -> Any:
            try:
                return fn()
            except Exception as error:
                raised.append([c.__module__ + "." + c.__name__ for c in type(error).__mro__])
                raise

        accept(what, watched, *args, **kwargs)

    module.right_or_clear = right_or_clear


def _child(request: dict[str, Any], path: str) -> None:
    # Nothing a child prints may reach the server's stdout: that is the protocol's.
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    result = run_here(request["target"], request["contender"])
    Path(path).write_text(json.dumps(result))


def _serve_one(request: dict[str, Any]) -> dict[str, Any]:
    handle, path = tempfile.mkstemp(prefix="conformance-")
    os.close(handle)
    begin_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            _child(request, path)
        finally:
            os._exit(0)
    status, late = _wait(pid, begin_s + request["timeout_s"])
    text = Path(path).read_text()
    os.unlink(path)
    wall_s = time.monotonic() - begin_s
    if text and not late:
        return {**json.loads(text), "wall_s": wall_s}
    if late:
        message = f"stopped after {request['timeout_s']:.0f} s"
    elif os.WIFSIGNALED(status):
        message = f"the process died of {signal.Signals(os.WTERMSIG(status)).name}"
    else:
        message = f"the process ended with status {status} and no answer"
    return {"status": "error", "message": message, "raised": None, "wall_s": wall_s}


def _wait(pid: int, until_s: float) -> tuple[int, bool]:
    pause_s = 0.002
    while True:
        got, status = os.waitpid(pid, os.WNOHANG)
        if got:
            return status, False
        if time.monotonic() > until_s:
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1], True
        time.sleep(pause_s)
        pause_s = min(0.05, pause_s * 1.5)


def serve() -> None:
    """Answer requests until stdin ends."""
    import torch
    import torch._dynamo  # the checkpoint of torch imports it at its first call: seconds, once instead of in each child
    import torch.distributed.algorithms._checkpoint.checkpoint_wrapper

    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):  # the contenders "plain" and "torch" need none
        import elbowroom  # noqa: F401
    for line in sys.stdin:
        print(json.dumps(_serve_one(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()
