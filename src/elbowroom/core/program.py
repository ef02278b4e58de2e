"""What calls with the same operator sequence share: operators, values, what autograd saved, and what follows from them.

A program holds no tensors. Values are numbered in the order in which a call meets them, so two calls that did the
same so far have the same numbers: comparing a call with a program needs no look-ahead, and a call that leaves a
program forks it where it left (rule 13).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elbowroom.core.geometry import Geometry
from elbowroom.core.operators import Facts

SOURCE = "source"  # the region did not make it: input, buffer, closure tensor
PARAMETER = "parameter"  # a source by identity, whatever wrote it (rule 11)
MADE = "made"  # an operator of the region made it: it can be replayed
OPAQUE = "opaque"  # its making was not seen, or replays otherwise: always kept (rule 8)


#: Plans remembered for one program, each with its own analysis.
MAX_VARIANTS = 64

#: Sets of scalars remembered as proved for one operator; a schedule has ever new ones.
MAX_SCALARS = 8


class Ref(NamedTuple):
    """A tensor argument: a value and the geometry over it (None: a tensor without strided storage)."""

    value: int
    geometry: Geometry | None


class Value:
    """One version of one storage. ``maker`` is the index of its operator, -1 if none made it."""

    __slots__ = (
        "alias_of", "device", "geometry", "keep", "kind", "label", "maker", "name", "nbytes", "read", "unfilled", "why",
    )  # fmt: skip

    def __init__(
        self, kind: str, maker: int, nbytes: int, geometry: Geometry | None, device: torch.device, why: str = ""
    ) -> None:
        self.kind = kind
        self.maker = maker
        self.nbytes = nbytes
        self.geometry = geometry
        self.device = device
        self.why = why
        self.keep = False  # the policy asked for it
        self.label: str | None = None
        self.name: str | None = None  # of a source: the parameter or argument it is
        self.read = False  # some recorded operator or slot reads this version
        self.unfilled = False  # allocated by an `empty*` and not written since
        self.alias_of: int | None = None  # opaque by a touch: the value it was until then

    @property
    def at_hand(self) -> bool:
        """Held from the forward on, whenever something needs it."""
        return self.kind != MADE or self.keep


class Operator:
    """One recorded operator: the function, its arguments with Refs for tensors, and what it made and wrote.

    ``outputs`` has one value number for each tensor of the flattened result, -1 where it made none (a view, a written
    argument). ``writes`` are (old value, new value, whether the old content is needed).
    ``touched`` are the values that became opaque between the operator before and this one.
    """

    __slots__ = (
        "args", "call", "default_dtype", "facts", "first_value", "flat", "func", "grad_mode", "kwargs", "line",
        "module", "opaque", "outputs", "proved", "reads", "scalars", "touched", "wiring", "writes",
    )  # fmt: skip

    def __init__(self, func: Any, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.call = getattr(func, "_op", func)  # the overload without its Python wrapper
        self.facts = facts
        self.args = args
        self.kwargs = kwargs
        self.wiring: list[Any] = []
        self.scalars: list[Any] = []
        self.reads: tuple[int, ...] = ()
        self.outputs: tuple[int, ...] = ()
        self.writes: tuple[tuple[int, int, bool], ...] = ()
        self.touched: tuple[int, ...] = ()
        self.first_value = 0
        self.grad_mode = True
        self.default_dtype = torch.float32
        self.line = ""
        self.module = ""
        self.proved = False
        self.flat = False  # it returns a tuple of tensors
        self.opaque = False

    @property
    def made(self) -> Iterator[int]:
        for value in self.outputs:
            if value >= 0:
                yield value
        for _, new, _ in self.writes:
            yield new

    @property
    def shapes(self) -> str:
        return ", ".join(str(r.geometry) for r in refs_of((self.args, self.kwargs))) or "no tensors"


class Slot(NamedTuple):
    """One tensor that autograd saved: the value, its geometry, and, once the region has ended, what that means.

    ``bound`` is the value that the storage held at the region's end (rule 6); ``dead`` the error of plain autograd.
    """

    value: int
    geometry: Geometry | None
    bound: int
    dead: str = ""


@dataclass
class KeptRow:
    """A value that is kept although no policy asked for it: which operator, where, how much, why."""

    operator: str
    line: str
    nbytes: int
    why: str


class Sweep(NamedTuple):
    """A prepared replay: which operators to run, when to free what, what to cache and who waits for it (rule 3)."""

    steps: tuple[
        tuple[int, tuple[int, ...], frozenset[int]], ...
    ]  # (operator, values to free after, values to overwrite)
    leaves: tuple[int, ...]  # values read as they are
    cached: frozenset[int]
    pending: dict[int, int]  # cached value -> slots that still wait for it
    by_slot: dict[int, tuple[int, ...]]  # slot -> cached values it waits for


class Layout(NamedTuple):
    """The beginning of a tape's life: counts, which values are held, which slots have handles, which draws are moot."""

    counts: list[int]
    op_counts: list[int]
    needed: tuple[int, ...]
    unneeded: tuple[int, ...]
    live: bytes
    moot_draws: tuple[int, ...]


@dataclass(eq=False, repr=False)
class Program:
    """Operators, value table and saved table of one operator sequence, and the analysis that a plan of it needs."""

    region: str
    ops: list[Operator] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    touched_last: tuple[int, ...] = ()
    finished: bool = False
    calls: int = 0
    counts: list[int] = field(default_factory=list)
    op_counts: list[int] = field(default_factory=list)
    snapshots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    direct: frozenset[int] = frozenset()  # slots on sources that autograd can hold itself, as without checkpointing
    expected: list[tuple[Any, ...]] = field(default_factory=list)  # per slot: value, geometry, direct; for comparing
    layouts: tuple[Layout, Layout] | None = None  # of a tape: every slot has a handle; all but the direct ones have
    holds: frozenset[int] = frozenset()
    remade: frozenset[int] = frozenset()  # kept values whose makers stay reachable, since that is free
    watched: bool = True  # addresses were watched while it was recorded from its first operator on
    exposed: frozenset[int] = (
        frozenset()
    )  # kept values that plain autograd would not have saved: others may write to them
    unsaved: frozenset[int] = frozenset()  # sources that replays need and plain autograd would not have saved
    proved_scalars: dict[int, list[list[Any]]] = field(default_factory=dict)
    replays: int = 0
    parent: Program | None = None  # of a variant: the program as its policy has it
    variants: dict[frozenset[int], Program] = field(default_factory=dict)
    sweeps: dict[tuple[int, bytes, bytes], Sweep] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"<Program of {self.region}: {len(self.ops)} operators, {len(self.values)} values, {len(self.slots)} saved>"
        )

    def fork(self, n_ops: int, n_values: int, n_slots: int) -> Program:
        """A draft that shares the first operators; values are copied, since what is kept of them may differ."""
        draft = Program(self.region)
        draft.ops = self.ops[:n_ops]
        draft.values = [copy.copy(v) for v in self.values[:n_values]]
        draft.slots = self.slots[:n_slots]
        return draft

    @property
    def root(self) -> Program:
        """The program itself, of which this may be a variant."""
        return self if self.parent is None else self.parent

    @property
    def keeps(self) -> frozenset[int]:
        """The made values that are kept by choice."""
        return frozenset(i for i, v in enumerate(self.values) if v.kind == MADE and v.keep)

    def variant(self, keep: frozenset[int]) -> Program:
        """The same program where ``keep`` are the made values that its calls keep: one entry of a plan.

        Operators, slots and proofs are shared; only what is held, and what follows from it, differs.
        """
        root = self.root
        if keep == root.keeps:
            return root
        found = root.variants.get(keep)
        if found is None:
            while len(root.variants) >= MAX_VARIANTS:
                del root.variants[next(iter(root.variants))]
            found = Program(root.region, ops=root.ops, slots=root.slots, parent=root)
            found.values = [copy.copy(v) for v in root.values]
            for i, value in enumerate(found.values):
                value.keep = value.kind == MADE and i in keep
            found.touched_last, found.watched = root.touched_last, root.watched
            found.proved_scalars = root.proved_scalars
            found.finish()
            root.variants[keep] = found
        return found

    @property
    def kept_rows(self) -> list[KeptRow]:
        """The opaque values: whose they are and why they are kept."""
        rows = []
        for value in self.values:
            if value.kind == OPAQUE:
                maker = value.maker if value.alias_of is None else self.values[value.alias_of].maker
                op = self.ops[maker] if maker >= 0 else None
                rows.append(KeptRow(str(op.func) if op else "an input", op.line if op else "", value.nbytes, value.why))
        return rows

    def remember_scalars(self, k: int, scalars: list[Any]) -> None:
        """Operator ``k`` is proved with these scalars, too: a call that has them again needs no proof for it."""
        known = self.proved_scalars.setdefault(k, [])
        known.append(scalars)
        del known[:-MAX_SCALARS]

    # What is needed, and by how many -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Count who needs each value: live slots on it, and needed operators that read it (rule 4).

        ``counts[v] == 0`` means that nothing needs v; ``op_counts[k]`` is how many made values need operator k.
        """
        self.remade = frozenset()
        self.remade = frozenset(
            i for i, v in enumerate(self.values) if v.kind == MADE and v.keep and self._can_remake(i)
        )
        self.counts, self.op_counts = self.count(range(len(self.slots)))
        newest = {old for op in self.ops for old, _, _ in op.writes}
        self.direct = frozenset(
            i for i, s in enumerate(self.slots)
            if self.values[s.value].kind in (SOURCE, PARAMETER)
            and s.bound == s.value and not s.dead and s.value not in newest
        )  # fmt: skip
        self.expected = [
            (s.value, g.size, g.stride, g.offset, g.dtype, g.conj, g.neg, i in self.direct)
            for i, s in enumerate(self.slots) if (g := s.geometry) is not None
        ]  # fmt: skip
        self.layouts = (self.layout(frozenset()), self.layout(self.direct))
        self.snapshots = {}
        for k, op in enumerate(self.ops):
            old = tuple(o for o, _, _ in op.writes if self.values[o].kind != MADE and self.counts[o])
            if old:
                self.snapshots[k] = old
        touched = {v.alias_of for v in self.values if v.alias_of is not None}
        self.holds = frozenset(
            i for i, v in enumerate(self.values)
            if v.maker >= 0 and (v.kind == OPAQUE or i in touched or (v.keep and self.counts[i]))
        )  # fmt: skip
        saved = {s.bound for s in self.slots}
        self.unsaved = frozenset(
            i for i, v in enumerate(self.values)
            if v.kind == SOURCE and v.geometry is not None and self.counts[i] and i not in saved
        )  # fmt: skip
        self.exposed = frozenset(
            i for i, v in enumerate(self.values) if v.kind == MADE and v.keep and self.counts[i] and i not in saved
        )
        self.sweeps.clear()
        self.finished = True

    def _can_remake(self, value: int) -> bool:
        """Whether a kept value could be replayed at no cost in memory, should somebody change it (rule 7)."""
        saved = {s.bound for s in self.slots}
        leaves: set[int] = set()
        at_hand = bytearray(v.at_hand for v in self.values)
        for v in self.ops[self.values[value].maker].reads:
            self.needs(v, at_hand, set(), leaves)
        return all(self.values[v].kind == PARAMETER or v in saved for v in leaves)

    def layout(self, direct: frozenset[int]) -> Layout:
        """What a tape needs to know at the region's end, if autograd holds the sources of ``direct`` slots itself."""
        counts, op_counts = self.count(i for i in range(len(self.slots)) if i not in direct)
        needed = tuple(v for v, n in enumerate(counts) if n and self.values[v].at_hand)
        unneeded = tuple(v for v, n in enumerate(counts) if not n)
        live = bytes(i not in direct for i in range(len(self.slots)))
        draws = tuple(k for k, op in enumerate(self.ops) if op.facts.seeded and not op_counts[k])
        return Layout(counts, op_counts, needed, unneeded, live, draws)

    def count(self, slots: Iterable[int]) -> tuple[list[int], list[int]]:
        counts = [0] * len(self.values)
        op_counts = [0] * len(self.ops)
        stack = []
        for i in slots:
            slot = self.slots[i]
            if not slot.dead and slot.bound >= 0:
                stack.append(slot.bound)
        while stack:
            v = stack.pop()
            counts[v] += 1
            value = self.values[v]
            if counts[v] > 1 or (value.at_hand and v not in self.remade):
                continue
            op_counts[value.maker] += 1
            if op_counts[value.maker] == 1:
                stack.extend(self.ops[value.maker].reads)
        return counts, op_counts

    # Sweeps --------------------------------------------------------------------------------------------------------

    def needs(self, target: int, at_hand: bytearray, made: set[int], leaves: set[int] | None = None) -> set[int]:
        """The operators that lead to ``target`` from values at hand (or made by a sweep already planned)."""
        found: set[int] = set()
        stack = [target]
        while stack:
            v = stack.pop()
            if at_hand[v] or v in made:
                if leaves is not None:
                    leaves.add(v)
                continue
            k = self.values[v].maker
            if k < 0:
                if leaves is not None:
                    leaves.add(v)
                continue  # a leaf that is gone: the replayer says so when it reads it
            if k not in found:
                found.add(k)
                stack.extend(self.ops[k].reads)
        return found

    def sweep(self, target: int, at_hand: bytearray, waiting: bytearray) -> Sweep:
        """The sweep that makes ``target``: rule 3. ``waiting`` marks the slots not yet asked in this graph task."""
        key = (target, bytes(at_hand), bytes(waiting))
        found = self.sweeps.get(key)
        if found is None:
            if len(self.sweeps) >= 4 * len(self.slots) + 64:
                self.sweeps.clear()  # asked in ever other orders: remembering them would only grow
            found = self.sweeps[key] = self._plan_sweep(target, at_hand, waiting)
        return found

    def _plan_sweep(self, target: int, at_hand: bytearray, waiting: bytearray) -> Sweep:
        run = self.needs(target, at_hand, set())
        wanted = {self.slots[i].bound for i, waits in enumerate(waiting) if waits}
        made = {v for k in run for v in self.ops[k].made if v in wanted}
        rest = [v for v in sorted(wanted) if not at_hand[v]]
        grew = True
        while grew:
            grew = False
            left = []
            for v in rest:
                if v in made:
                    continue
                needed = self.needs(v, at_hand, made)
                if needed & run:  # it would run again what this sweep runs: take it along
                    run |= needed
                    made.update(u for k in needed for u in self.ops[k].made if u in wanted)
                    grew = True
                else:
                    left.append(v)
            rest = left
        cached = frozenset(v for k in run for v in self.ops[k].made if (v in wanted or v == target) and not at_hand[v])
        return self._schedule(sorted(run), cached, at_hand, waiting)

    def _schedule(self, run: list[int], cached: frozenset[int], at_hand: bytearray, waiting: bytearray) -> Sweep:
        last: dict[int, int] = {}
        made: set[int] = set()
        leaves: list[int] = []
        for k in run:
            for v in self.ops[k].reads:
                if at_hand[v] or v not in made:
                    leaves.append(v)
                else:
                    last[v] = k
            for v in self.ops[k].made:
                if not at_hand[v]:
                    made.add(v)
                    last.setdefault(v, k)
        steps = []
        frees: dict[int, list[int]] = {}
        for v, k in last.items():
            if v not in cached:
                frees.setdefault(k, []).append(v)
        for k in run:
            free = tuple(frees.get(k, ()))
            ours = frozenset(old for old, _, _ in self.ops[k].writes if old in free and not at_hand[old])
            steps.append((k, free, ours))
        after = bytearray(at_hand)
        for v in cached:
            after[v] = 2
        pending: dict[int, int] = {}
        by_slot: dict[int, tuple[int, ...]] = {}
        for i, waits in enumerate(waiting):
            if waits:
                frontier: set[int] = set()
                self.needs(self.slots[i].bound, after, set(), frontier)
                on = tuple(v for v in frontier if after[v] == 2)
                if on:
                    by_slot[i] = on
                    for v in on:
                        pending[v] = pending.get(v, 0) + 1
        return Sweep(tuple(steps), tuple(dict.fromkeys(leaves)), cached, pending, by_slot)


def refs_of(template: Any) -> Iterator[Ref]:
    """The Refs inside an argument template, in order."""
    if type(template) is Ref:
        yield template
    elif isinstance(template, (list, tuple)):
        for item in template:
            yield from refs_of(item)
    elif isinstance(template, dict):
        for item in template.values():
            yield from refs_of(item)


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """The tensors inside arguments or results, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_of(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_of(item)
