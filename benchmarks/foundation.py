"""What Elbowroom costs and saves beside plain autograd and torch.utils.checkpoint, on one machine, CPU.

    python benchmarks/foundation.py gpt|overhead|memory|import [--rounds N] [--json FILE]

Contenders share one process and the very same parameters, and take turns (A B C A B C ...), so that a machine that
gets busy slows all alike. Before a contender is timed, its gradients are compared with vanilla's bit for bit, at its
first step and at its second. Times are ratios of medians to vanilla, with the smallest and the largest round; CPU time
is that of the whole process, all threads. A peak is counted by ``elbowroom.Meter``: bytes above the start of the step,
gradients included, parameters not.

Elbowroom proves again at the calls 2, 4, 8, 16, ... of a region. Steps 1 and 2 are the warm-ups, step 3 is metered as
a usual step and step 4 as one that proves; the timed rounds begin at step 5.
"""

from __future__ import annotations

import os

# Idle worker threads must sleep: spinning counts as CPU time. OpenMP reads it when torch loads.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import argparse
import datetime
import functools
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import works
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import elbowroom

N_WARMUPS = 2

# ----------------------------------------------------------------------------------------------------
# Contenders: what is done to every block of a model
# ----------------------------------------------------------------------------------------------------


def with_elbowroom(model: nn.Module, keep: str | None = None) -> None:
    """Elbowroom on every block."""
    for block in model.blocks:  # type: ignore[union-attr]
        elbowroom.wrap(block, keep=keep)


def with_torch(model: nn.Module, operators: tuple[Any, ...] = (), *, reentrant: bool = False) -> None:
    """Torch's checkpoint around every block; with ``operators`` its selective variant, which keeps their results."""
    options: dict[str, Any] = {"use_reentrant": reentrant}
    if operators:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keeping(operators))
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = functools.partial(checkpoint, block.forward, **options)


def _keeping(operators: tuple[Any, ...]) -> Callable[..., CheckpointPolicy]:
    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
ATTENTION = (aten._scaled_dot_product_flash_attention_for_cpu.default,)

Contenders = dict[str, Callable[[nn.Module], None]]

ON_GPT: Contenders = {
    "vanilla": lambda model: None,
    "torch, every block": with_torch,
    "torch selective, attention kept": lambda model: with_torch(model, ATTENTION),
    "torch selective, matmuls kept": lambda model: with_torch(model, MATMULS),
    "elbowroom, keep nothing": with_elbowroom,
    "elbowroom, keep attention": lambda model: with_elbowroom(model, "attention"),
    "elbowroom, keep matmuls": lambda model: with_elbowroom(model, "matmuls"),
}
ON_OVERHEAD: Contenders = {
    "vanilla": lambda model: None,
    "torch, reentrant": lambda model: with_torch(model, reentrant=True),
    "torch, non-reentrant": with_torch,
    "elbowroom, keep nothing": with_elbowroom,
}

# ----------------------------------------------------------------------------------------------------
# Measuring
# ----------------------------------------------------------------------------------------------------


@dataclass
class Cost:
    """What one contender took. Seconds are per step, one entry for each round."""

    contender: str
    peak_bytes: int = 0
    proving_peak_bytes: int | None = None
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


class UnequalError(Exception):
    """A contender's gradients are not vanilla's: its time would say nothing."""


def measure(work: works.Work, contenders: Contenders, *, n_rounds: int, steps_per_round: int) -> list[Cost]:
    """Checks, meters and times every contender on ``work``. Raises UnequalError on the first gradient that differs."""
    entries = {name: work.sharing() for name in contenders}
    for name, prepare in contenders.items():
        prepare(entries[name].model)
    costs = {name: Cost(name) for name in contenders}

    expected = _gradients_of(work)
    for step in range(1, N_WARMUPS + 1):
        for name, entry in entries.items():
            _say(f"warm-up {step} of {N_WARMUPS}: {name}")
            _compare(expected, _gradients_of(entry), name, step)
    del expected
    for name, entry in entries.items():
        costs[name].peak_bytes = _peak_bytes(entry)
        if elbowroom.proof(entry.model).regions:
            costs[name].proving_peak_bytes = _peak_bytes(entry)
        _say(f"peak {costs[name].peak_bytes:,} bytes: {name}")
    for number in range(1, n_rounds + 1):
        for name, entry in entries.items():
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            for _ in range(steps_per_round):
                _take_step(entry)
            costs[name].wall_s.append((time.perf_counter() - wall_s) / steps_per_round)
            costs[name].cpu_s.append((time.process_time() - cpu_s) / steps_per_round)
            _say(f"round {number} of {n_rounds}, {costs[name].cpu_s[-1]:.4f} s of CPU time per step: {name}")
    return list(costs.values())


def _take_step(work: works.Work) -> None:
    """Forward, loss, backward; gradients are None before and after. No optimizer: it is the same for all."""
    work.backward()
    work.model.zero_grad()
    work.inputs.grad = None


def _peak_bytes(work: works.Work) -> int:
    with elbowroom.Meter() as meter:
        _take_step(work)
    return meter.peak_bytes


def _gradients_of(work: works.Work) -> dict[str, Tensor | None]:
    work.backward()
    gradients = {name: parameter.grad for name, parameter in work.model.named_parameters()}
    work.model.zero_grad()
    work.inputs.grad = None
    return gradients


def _compare(expected: dict[str, Tensor | None], found: dict[str, Tensor | None], contender: str, step: int) -> None:
    for name, wanted in expected.items():
        got = found[name]
        if wanted is None or got is None or not torch.equal(wanted.view(torch.int32), got.view(torch.int32)):
            raise UnequalError(f"{contender}, step {step}: the gradient of {name} is not vanilla's")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------
# Suites
# ----------------------------------------------------------------------------------------------------


def gpt(n_rounds: int) -> dict[str, Any]:
    """Peak and time on the GPT of ``works.gpt``: 12 blocks, dim 512, 512 tokens, batch 4."""
    return {"gpt": [asdict(cost) for cost in measure(works.gpt(), ON_GPT, n_rounds=n_rounds, steps_per_round=1)]}


def overhead(n_rounds: int) -> dict[str, Any]:
    """Python's cost per operator: blocks so small that nothing else counts, one thread, 20 steps per round."""
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for after_each_linear in (True, False):
        work = works.overhead(after_each_linear=after_each_linear)
        costs = measure(work, ON_OVERHEAD, n_rounds=n_rounds, steps_per_round=20)
        result[work.name] = [asdict(cost) for cost in costs]
    return result


def memory(n_rounds: int) -> dict[str, Any]:
    """Steps of AdamW on a small GPT with the garbage collector off: what is alive after each, each one's peak."""
    work = works.gpt(vocabulary=512, dim=128, n_heads=4, n_layers=4, sequence_length=128, batch_size=4)
    plain_peak_bytes = _peak_bytes(work)
    with_elbowroom(work.model)
    optimizer = torch.optim.AdamW(work.model.parameters())
    live, peaks, left = [], [], []
    gc.disable()
    try:
        for _ in range(n_rounds):
            # The meter collects cycles when it starts: what a step leaves in cycles is counted before that.
            with elbowroom.Meter() as meter:
                work.backward()
                optimizer.step()
                optimizer.zero_grad()
            live.append(_live_bytes())
            peaks.append(meter.peak_bytes)
            left.append(meter.end_bytes)
    finally:
        gc.enable()
    compared = [step for step in range(3, n_rounds + 1) if step & (step - 1)]
    return {
        "plain_peak_bytes": plain_peak_bytes,
        "live_bytes": live,
        "peak_bytes": peaks,
        "left_bytes": left,
        "steps_compared": compared,
        # What a step leaves in garbage cycles would be the same every time: nothing at all may be left.
        "constant": all(len({series[step - 1] for step in compared}) == 1 for series in (live, peaks))
        and not any(left[step - 1] for step in compared),
    }


def _live_bytes() -> int:
    """Bytes of all storages under tensors that exist as Python objects, those in garbage cycles included."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


_IMPORTS = """
import json, time
marks = [time.perf_counter()]
import torch
marks.append(time.perf_counter())
import elbowroom
marks.append(time.perf_counter())
elbowroom.checkpoint
marks.append(time.perf_counter())
print(json.dumps([after - before for before, after in zip(marks, marks[1:])]))
"""


def imports(n_rounds: int) -> dict[str, Any]:
    """Seconds that ``import elbowroom`` adds to ``import torch``, in fresh processes."""
    names = ("import torch", "then import elbowroom", "then elbowroom.checkpoint")
    rows: dict[str, list[float]] = {name: [] for name in names}
    for number in range(n_rounds + 1):
        out = subprocess.run([sys.executable, "-c", _IMPORTS], check=True, capture_output=True, text=True).stdout
        if number:  # the first one fills the disk cache
            for name, seconds in zip(names, json.loads(out), strict=True):
                rows[name].append(seconds)
    return {"import_s": rows}


# ----------------------------------------------------------------------------------------------------
# Tables
# ----------------------------------------------------------------------------------------------------


def tables_of(suite: str, result: dict[str, Any]) -> list[Table]:
    """The results of a suite for people."""
    if suite == "memory":
        return [_memory_table(result)]
    if suite == "import":
        table = _table("fresh processes", "", "median", "min", "max")
        for name, rounds_s in result["import_s"].items():
            numbers = (statistics.median(rounds_s), min(rounds_s), max(rounds_s))
            table.add_row(name, *(f"{1000 * seconds:.1f} ms" for seconds in numbers))
        return [table]
    return [_cost_table(name, costs) for name, costs in result.items()]


def _cost_table(title: str, costs: list[dict[str, Any]]) -> Table:
    table = _table(title, "contender", "peak MiB", "ratio", "proving step", "CPU time", "min .. max", "wall", "ms/step")
    plain = costs[0]
    for cost in costs:
        proving_bytes = cost["proving_peak_bytes"]
        cpu, wall = (_ratios(cost[key], plain[key]) for key in ("cpu_s", "wall_s"))
        table.add_row(
            cost["contender"],
            f"{cost['peak_bytes'] / 2**20:,.2f}",
            f"{cost['peak_bytes'] / plain['peak_bytes']:.3f}",
            "" if proving_bytes is None else f"{proving_bytes / plain['peak_bytes']:.3f}",
            f"{cpu[0]:.2f}",
            f"{cpu[1]:.2f} .. {cpu[2]:.2f}",
            f"{wall[0]:.2f}",
            f"{1000 * statistics.median(cost['wall_s']):,.1f}",
        )
    return table


def _ratios(rounds_s: list[float], plain_s: list[float]) -> tuple[float, float, float]:
    """Median, smallest and largest round, each over vanilla's median."""
    unit_s = statistics.median(plain_s)
    return statistics.median(rounds_s) / unit_s, min(rounds_s) / unit_s, max(rounds_s) / unit_s


def _memory_table(result: dict[str, Any]) -> Table:
    verdict = "constant to the byte" if result["constant"] else "NOT constant"
    compared = result["steps_compared"]
    table = _table(
        f"{verdict} over {len(compared)} steps\n({compared[0]} to {compared[-1]} without powers of two, which prove)",
        "step",
        "live bytes after it",
        "its peak, bytes",
        "left by it, bytes",
    )
    series = list(zip(result["live_bytes"], result["peak_bytes"], result["left_bytes"], strict=True))
    shown = [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, len(series)]
    for step in sorted({step for step in shown if step <= len(series)}):
        table.add_row(str(step), *(f"{number:,}" for number in series[step - 1]))
    table.add_section()
    table.add_row("plain, without optimizer", "", f"{result['plain_peak_bytes']:,}", "")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": models[0].partition(": ")[2] if models else platform.processor(),
        "n_cpus": os.cpu_count(),
        "n_threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "elbowroom": elbowroom.__version__,
    }


# Suite and its rounds unless told otherwise; for `memory` these are its steps.
SUITES: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "gpt": (gpt, 5),
    "overhead": (overhead, 15),
    "memory": (memory, 50),
    "import": (imports, 7),
}


def main() -> int:
    """Exit code 0; 1 if gradients differ or memory is not constant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--rounds", type=int, help="timed rounds; for `memory`: steps")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    options = parser.parse_args()
    run, n_rounds = SUITES[options.suite]
    found = machine()
    try:
        result = run(options.rounds or n_rounds)
    except UnequalError as error:
        print(f"not equal: {error}", file=sys.stderr)
        return 1
    found["n_threads"] = torch.get_num_threads()
    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in tables_of(options.suite, result):
        console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in found.items()), highlight=False)
    if options.json:
        options.json.write_text(json.dumps({"suite": options.suite, "machine": found, "result": result}) + "\n")
    return 0 if result.get("constant", True) else 1


if __name__ == "__main__":
    sys.exit(main())
