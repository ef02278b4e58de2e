"""The command line: ``elbowroom train``, ``elbowroom plan`` and ``elbowroom check``.

Exit codes: 0 done (check: equal), 1 failed (check: not equal), 2 asked for something that cannot be done,
130 stopped by Ctrl-C. Results go to stdout, everything else to stderr. torch is imported only when a
command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn

import tyro

from elbowroom.errors import ElbowroomError, InfeasibleBudgetError, UsageError
from elbowroom.training.config import CheckConfig, PlanConfig, TrainConfig

_JSON = tyro.conf.arg(help="print the result as one JSON object on stdout instead of a table")
_UNNAMED = tyro.conf.arg(name="")


def train(config: Annotated[TrainConfig, _UNNAMED], *, json: Annotated[bool, _JSON] = False) -> int:
    """Train a GPT on text, in the memory you have.

    Without any flag: a tiny GPT on the source text of this Python's standard library, about a minute on
    2 CPU cores. With --budget, the second step on keeps to it, at the least extra time. At the end a table shows
    what that saved and cost, and a sample of what the model writes.
    """
    from elbowroom.training import loop

    summary = loop.train(config)
    _print_result("train", summary, as_json=json)
    return 130 if summary["interrupted"] else 0


def plan(config: Annotated[PlanConfig, _UNNAMED], *, json: Annotated[bool, _JSON] = False) -> int:
    """Show what a byte budget buys for a model: peak of a training step against its time.

    One step is run and measured, then plans are made for budgets from the least possible to what the step takes without
    help. Prints them beside the usual rules of thumb, writes the plan for --budget and a picture.

    Exit code 2 if the budget is less than any plan can do with; the message says how much that is.
    """
    from elbowroom.training import tradeoff

    result = tradeoff.trade_off(config, _say)
    _print_result("plan", result, as_json=json)
    return 0


def check(config: Annotated[CheckConfig, _UNNAMED], *, json: Annotated[bool, _JSON] = False) -> int:
    """Check that checkpointing changes nothing, bit for bit.

    Compared are outputs, loss, every gradient, parameters and buffers after an update, and random streams.

    Exit code 0 only if all is equal, 1 if not (the first difference is named), 2 if the model cannot be run.
    """
    from elbowroom.training import check as comparison

    result = comparison.check(config, _say)
    _print_result("check", result, as_json=json)
    if not result["equal"]:
        print(f"not equal: {result['first_difference']}", file=sys.stderr)
    return 0 if result["equal"] else 1


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits the process."""
    # Idle worker threads sleep instead of spinning: on a machine that others use too, spinning costs several times
    # the work. Read by OpenMP when torch loads; who has set it keeps it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app = tyro.extras.SubcommandApp()
    app.command(train)
    app.command(plan)
    app.command(check)
    try:
        code = app.cli(
            prog="elbowroom",
            description="Activation checkpointing by replay: the same gradients, in the memory you have.",
            args=arguments,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
        )
    except (UsageError, InfeasibleBudgetError) as error:
        _fail(error, 2)
    except ElbowroomError as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        print("elbowroom: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(code)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _fail(error: ElbowroomError, code: int) -> NoReturn:
    print(f"elbowroom: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(code)


def _print_result(command: Literal["train", "plan", "check"], result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"command": command} | result, default=str, allow_nan=False))
        return
    from rich.console import Console

    from elbowroom.reporting.tables import check_table, plan_table, train_table

    table = {"train": train_table, "plan": plan_table, "check": check_table}[command]
    Console().print(table(result))
