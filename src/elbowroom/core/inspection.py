"""What autograd would keep, and what was proved: reports about regions, as rows and as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from elbowroom.core.checkpoint import regions_of, wrapped_region
from elbowroom.core.geometry import Geometry
from elbowroom.core.program import PARAMETER, KeptRow, Program
from elbowroom.core.recorder import Recorder
from elbowroom.core.region import Family, Region
from elbowroom.units import format_bytes


@dataclass(frozen=True)
class SavedRow:
    """One storage that autograd keeps for backward. ``source`` says that the function did not make it."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    operator: str
    module: str
    line: str
    source: bool
    parameter: bool


@dataclass(frozen=True)
class Saved:
    """What plain autograd keeps of a call, largest first. Iterable; ``str()`` is a table."""

    rows: tuple[SavedRow, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes that the call keeps alive, parameters not counted: those live anyway."""
        return sum(row.nbytes for row in self.rows if not row.parameter)

    def __iter__(self) -> Iterator[SavedRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        width = max([len("operator"), *(len(row.operator) for row in self.rows)])
        lines = [f"{'bytes':>10}  {'shape':<22} {'dtype':<9} {'operator':<{width}} {'module':<20} line"]
        for row in self.rows:
            lines.append(
                f"{format_bytes(row.nbytes):>10}  {list(row.shape)!s:<22} {str(row.dtype).removeprefix('torch.'):<9} "
                f"{row.operator:<{width}} {row.module:<20} {row.line}"
            )
        lines.append(f"{format_bytes(self.total_bytes):>10}  kept for backward, parameters not counted")
        return "\n".join(lines)


def saved(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Saved:
    """What plain autograd would keep of ``fn(*args, **kwargs)``: bytes, shape, dtype, operator, module, source line.

    Runs ``fn`` once, with its side effects; one row for each storage, however many saved tensors look into it.
    Raises what ``fn`` raises.
    """
    module = fn if isinstance(fn, Module) else None
    region = Region(getattr(fn, "__qualname__", type(fn).__name__), Family(), None, "never", module)
    recorder = Recorder(region, None, proving=False, watched=False)
    with torch.enable_grad():
        out = recorder.run(fn, args, kwargs)
    program = recorder.program
    rows = {}
    for slot in program.slots:
        if slot.bound not in rows and slot.geometry is not None:
            rows[slot.bound] = _saved_row(program, slot.bound, slot.geometry)
    del out
    return Saved(tuple(sorted(rows.values(), key=lambda row: -row.nbytes)))


def _saved_row(program: Program, value: int, geometry: Geometry) -> SavedRow:
    info = program.values[value]
    op = program.ops[info.maker] if info.maker >= 0 else None
    return SavedRow(
        nbytes=info.nbytes,
        shape=tuple(geometry.size),
        dtype=geometry.dtype,
        operator=str(op.func) if op else info.name or "an input",
        module=op.module if op else "",
        line=op.line if op else "",
        source=info.maker < 0,
        parameter=info.kind == PARAMETER,
    )


@dataclass(frozen=True)
class Proof:
    """What is proved of one or more regions. ``str()`` is a table.

    ``operators`` recorded and ``proved`` (a second run gave the same bits) count distinct operators over the programs;
    ``kept`` are values kept because replaying them would not be right, and why; ``replays`` counts operators replayed
    so far, ``saved_bytes`` what autograd asked to save, ``held_bytes`` what a call keeps (parameters not counted).
    """

    regions: int
    programs: int
    calls: int
    operators: int
    proved: int
    replays: int
    saved_bytes: int
    held_bytes: int
    kept: tuple[KeptRow, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.regions} regions, {self.programs} programs, {self.calls} calls, {self.replays} operators replayed",
            f"{self.proved} of {self.operators} operators proved bit for bit",
            f"{format_bytes(self.held_bytes)} held per call where autograd would save {format_bytes(self.saved_bytes)}",
        ]
        for row in self.kept:
            lines.append(f"kept {format_bytes(row.nbytes):>10}  {row.operator}: {row.why}  ({row.line})")
        return "\n".join(lines)


def proof(target: Any) -> Proof:
    """What was proved about a wrapped module (and all wrapped modules in it), or a function given to ``checkpoint``.

    A region that was never called has no programs: all counts are 0.
    """
    regions = _regions_in(target)
    programs = list(dict.fromkeys(p for region in regions for p in region.programs))
    operators = list({id(op): op for p in programs for op in p.ops}.values())
    kept = {(row.operator, row.line, row.nbytes, row.why): row for p in programs for row in p.kept_rows}
    return Proof(
        regions=len(regions),
        programs=len(programs),
        calls=sum(region.calls for region in regions),
        operators=len(operators),
        proved=sum(op.proved for op in operators),
        replays=sum(p.replays for p in programs),
        saved_bytes=sum(_bytes(p, {s.bound for s in p.slots}) for p in programs),
        held_bytes=sum(_bytes(p, {i for i, v in enumerate(p.values) if v.at_hand and p.counts[i]}) for p in programs),
        kept=tuple(kept.values()),
    )


def _bytes(program: Program, values: set[int]) -> int:
    return sum(program.values[v].nbytes for v in values if program.values[v].kind != PARAMETER)


def _regions_in(target: Any) -> list[Region]:
    if isinstance(target, Module):
        found = [wrapped_region(m) for m in target.modules()]
        regions = [r for r in found if r is not None]
        if regions:
            return regions
    return regions_of(target)
