"""One region call in numbers: what its tape holds, replays and caches, event by event, under any set of kept values.

This is what ``core/program.py`` and ``core/replayer.py`` do with tensors (rules 3, 4 and 6), written again with bytes.
Sets of values and of operators are integers with a bit for each: a menu asks for hundreds of these walks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from elbowroom.planning.profile import ASK, MADE, PARAMETER, SOURCE, EngineCosts, ProgramProfile


class Passage(NamedTuple):
    """A backward event as the tape sees it, in tape bytes: before it, at the highest of its sweep, after it.

    ``held``: the values held from the forward on, after the event (a set as bits). ``sweep``: for each operator of the
    sweep, in order, its index and the tape bytes at its highest; empty if nothing had to be replayed.
    """

    before_bytes: int
    highest_bytes: int
    after_bytes: int
    held: int
    sweep: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class CallRun:
    """One region call under one decision. ``kept_bytes`` to ``replayed`` are those of ``options.Option``.

    ``held``: the values held between forward and backward (as bits). ``forward``: bytes at the highest of each operator
    of the forward. ``course``: one passage for each event of the program. ``left_bytes``: held after the last event.
    ``recording_s``: the part of ``extra_s`` that is spent in the forward.
    """

    kept_bytes: int
    forward_bytes: int
    working_bytes: int
    extra_s: float
    replayed: int
    held: int
    forward: tuple[int, ...]
    course: tuple[Passage, ...]
    left_bytes: int
    recording_s: float


class Interpreter:
    """Runs one program under any keep set. Building it costs as much as a run: share it between runs."""

    def __init__(self, program: ProgramProfile, costs: EngineCosts) -> None:
        values, operators = program.values, program.operators
        self.program = program
        self.nbytes = [v.nbytes for v in values]
        self.maker = [v.maker for v in values]
        self.slots = program.slots
        self.reads = [o.reads for o in operators]
        self.made = [tuple(o.made) for o in operators]
        self.read_mask = [mask_of(r) for r in self.reads]
        self.made_mask = [mask_of(m) for m in self.made]
        self.is_made = mask_of(i for i, v in enumerate(values) if v.kind == MADE)
        # Kept or not, the old content of a written value is gone, and the engine replays it (rule 7).
        self.keepable = self.is_made & ~mask_of(old for o in operators for old, _, _ in o.writes)
        self.parameters = mask_of(i for i, v in enumerate(values) if v.kind == PARAMETER)
        self.saved = mask_of(program.saved)
        # What is made anew at each run of an operator: its outputs, and a storage for each written value.
        self.fresh_bytes = [sum(self.nbytes[v] for v in m) for m in self.made]
        self.transient_bytes = [o.transient_bytes for o in operators]
        self.run_s = [o.seconds + costs.replay_s for o in operators]
        self.recording_s = costs.record_s * len(operators) + costs.slot_s * len(program.slots)
        self._look_back()
        self._look_at_forward()

    def _look_back(self) -> None:
        """All operators and values that lead to each value: what no keep set can make more of."""
        self.ops_before = [0] * len(self.nbytes)
        self.values_before = [1 << v for v in range(len(self.nbytes))]
        for k, reads in enumerate(self.reads):
            ops, values = 1 << k, 0
            for v in reads:
                ops |= self.ops_before[v]
                values |= self.values_before[v]
            for v in self.made[k]:
                assert self.read_mask[k] < 1 << v, (
                    "values are numbered as they are met: what is made comes after what is read"
                )
                self.ops_before[v] = ops
                self.values_before[v] |= values

    def _look_at_forward(self) -> None:
        """When values die in the forward. A written value's storage lives on as that of the new one."""
        values, operators = self.program.values, self.program.operators
        last = [len(operators)] * len(values)
        for k, op in enumerate(operators):
            for v in op.reads:
                last[v] = k
        foreign = {i for i, v in enumerate(values) if v.kind in (SOURCE, PARAMETER)}  # in storages of the caller
        for k, op in enumerate(operators):
            for old, new, _ in op.writes:
                last[old] = k
                if old in foreign:
                    foreign.add(new)
        self.foreign = mask_of(foreign)
        self.dies: list[list[int]] = [[] for _ in operators]
        for v, k in enumerate(last):
            if v not in foreign and k < len(operators):
                self.dies[k].append(v)

    def run(self, keep: Iterable[int] | None) -> CallRun:
        """The call under ``keep``; None: plain."""
        tape = _PlainTape(self) if keep is None else _Tape(self, mask_of(keep))
        held, kept_bytes = tape.held, tape.level_bytes
        forward = self.forward(held)
        course = [tape.ask(e.slot) if e.kind == ASK else tape.release(e.slot) for e in self.program.events]
        working = 0
        for event, (before, highest, after, _, _) in zip(self.program.events, course, strict=True):
            working = max(working, event.level_bytes + max(before, highest), event.peak_bytes + after)
        recording_s = 0.0 if keep is None else self.recording_s
        return CallRun(
            kept_bytes, max(forward, default=0), max(0, working - kept_bytes), tape.replay_s + recording_s,
            tape.replayed, held, forward, tuple(course), tape.level_bytes, recording_s,
        )  # fmt: skip

    def forward(self, held: int) -> tuple[int, ...]:
        """Bytes at the highest of each operator of the forward, of what the call made, if ``held`` stays to its end."""
        nbytes = self.nbytes
        stays = held | self.foreign
        alive, highest = 0, []
        for k, op in enumerate(self.program.operators):
            alive += self.fresh_bytes[k]
            taken_over: tuple[int, ...] = ()
            if op.writes:
                taken_over = tuple(old for old, _, _ in op.writes if not stays >> old & 1)
                alive -= sum(nbytes[old] for old in taken_over)  # written in place
                for old, new, _ in op.writes:
                    if self.foreign >> new & 1 and not held >> new & 1:
                        alive -= nbytes[new]  # in a storage of the caller's
                    if self.foreign >> old & 1 and held >> old & 1:
                        alive += nbytes[old]  # its old content was copied first (rule 6)
            highest.append(alive + self.transient_bytes[k])
            for v in self.dies[k]:
                if not held >> v & 1 and v not in taken_over:
                    alive -= nbytes[v]
        return tuple(highest)

    def remade(self, keep: int) -> int:
        """Kept values that could be replayed at no cost in memory, so that their makers stay reachable (rule 7)."""
        free = self.parameters | self.saved  # at hand for as long as anybody could ask, or never gone
        found = 0
        for k, made in enumerate(self.made_mask):
            if not self.read_mask[k] & ~free:
                found |= made & keep
                free |= made & self.is_made & ~keep
            else:
                free &= ~(made & self.is_made & ~keep)
        return found

    def needs(self, target: int, at_hand: int) -> tuple[int, int]:
        """(operators that lead to ``target`` from values at hand, the values at hand that they read), as bits."""
        need = 1 << target
        if need & at_hand:
            return 0, need
        run = leaves = 0
        while need:
            k = self.maker[need.bit_length() - 1]
            run |= 1 << k
            reads = self.read_mask[k]
            leaves |= reads & at_hand
            need = (need | reads & ~at_hand) & ~self.made_mask[k]
        return run, leaves


class _PlainTape:
    """What autograd itself holds of a call: what was saved, until the last slot on it is let go."""

    replayed = 0
    replay_s = 0.0

    def __init__(self, machine: Interpreter) -> None:
        self.machine = machine
        self.held = machine.saved
        self.level_bytes = sum(machine.nbytes[v] for v in members(self.held))
        self.counts = [0] * len(machine.nbytes)
        for v in machine.slots:
            if v >= 0:
                self.counts[v] += 1

    def ask(self, slot: int) -> Passage:
        return Passage(self.level_bytes, self.level_bytes, self.level_bytes, self.held, ())

    def release(self, slot: int) -> Passage:
        before = self.level_bytes
        v = self.machine.slots[slot]
        if v >= 0:
            self.counts[v] -= 1
            if not self.counts[v]:
                self.held &= ~(1 << v)
                self.level_bytes -= self.machine.nbytes[v]
        return Passage(before, before, self.level_bytes, self.held, ())


class _Copy:
    """One cached copy of a value, for as long as the cache or an autograd node holds it."""

    __slots__ = ("cached", "nodes")

    def __init__(self) -> None:
        self.cached = True
        self.nodes = 0


class _Tape:
    """The tape of a recorded call: ``core.replayer.Tape`` with bytes in place of tensors."""

    def __init__(self, machine: Interpreter, keep: int) -> None:
        self.machine = machine
        keep &= machine.keepable
        self.remade = machine.remade(keep)
        # What has to be replayed when it is needed, or may be; all other values are held if they are needed at all.
        self.replayable = machine.is_made & ~keep | self.remade
        self._count()
        at_hand = ~machine.is_made | keep
        self.held = mask_of(v for v, n in enumerate(self.counts) if n and at_hand >> v & 1)
        self.level_bytes = sum(machine.nbytes[v] for v in members(self.held))
        self.cached = 0
        self.copies: dict[int, _Copy] = {}
        self.asked: dict[int, tuple[int, _Copy]] = {}  # slot -> the cached value that its node holds
        self.live = [v >= 0 for v in machine.slots]
        self.waiting = list(self.live)
        self.n_waiting = [0] * len(machine.nbytes)  # per value: slots on it that wait
        for v in machine.slots:
            if v >= 0:
                self.n_waiting[v] += 1
        self.pending: dict[int, int] = {}
        self.waits_for: dict[int, int] = {}  # value -> cached values that slots on it wait for (as bits)
        self.replayed = 0
        self.replay_s = 0.0

    def _count(self) -> None:
        """``Program.count``: by how many each value is needed, and by how many values each operator."""
        machine = self.machine
        self.counts = counts = [0] * len(machine.nbytes)
        self.op_counts = op_counts = [0] * len(machine.made)
        for v in machine.slots:
            if v >= 0:
                counts[v] += 1
        for k in range(len(op_counts) - 1, -1, -1):  # who reads a value ran after who made it
            for v in machine.made[k]:
                if counts[v] and self.replayable >> v & 1:
                    op_counts[k] += 1
            if op_counts[k]:
                for v in machine.reads[k]:
                    counts[v] += 1

    def ask(self, slot: int) -> Passage:
        """Autograd asks for what the slot saved (``Tape.fetch``)."""
        before = highest = self.level_bytes
        v = self.machine.slots[slot]
        sweep: tuple[tuple[int, int], ...] = ()
        if v < 0:
            return Passage(before, before, before, self.held, sweep)
        if not self.waiting[slot]:
            self._start_pass()
        if not (self.held | self.cached) >> v & 1:
            sweep = self._sweep(v)
            highest = max(before, max(nbytes for _, nbytes in sweep))
        if self.cached >> v & 1:
            self._let_go(slot)
            copy = self.copies[v]
            copy.nodes += 1
            self.asked[slot] = (v, copy)
        self._asked(slot)
        return Passage(before, highest, self.level_bytes, self.held, sweep)

    def release(self, slot: int) -> Passage:
        """The handle of the slot died (``Tape.release``)."""
        before = self.level_bytes
        machine = self.machine
        self._let_go(slot)
        self.live[slot] = False
        if self.waiting[slot]:
            self._asked(slot)
        stack = [machine.slots[slot]] if machine.slots[slot] >= 0 else []
        while stack:
            v = stack.pop()
            self.counts[v] -= 1
            if self.counts[v]:
                continue
            if self.cached >> v & 1:
                self._uncache(v)
            elif self.held >> v & 1:
                self.held &= ~(1 << v)
                self.level_bytes -= machine.nbytes[v]
            if self.replayable >> v & 1:
                k = machine.maker[v]
                self.op_counts[k] -= 1
                if not self.op_counts[k]:
                    stack.extend(machine.reads[k])
        return Passage(before, before, self.level_bytes, self.held, ())

    def _start_pass(self) -> None:
        """Another backward pass begins: no node runs, nothing is cached, every live slot may be asked again."""
        for slot in list(self.asked):
            self._let_go(slot)
        for v in members(self.cached):
            self._uncache(v)
        self.pending, self.waits_for = {}, {}
        self.waiting = list(self.live)
        self.n_waiting = [0] * len(self.n_waiting)
        for slot, waits in enumerate(self.waiting):
            if waits:
                self.n_waiting[self.machine.slots[slot]] += 1

    def _asked(self, slot: int) -> None:
        v = self.machine.slots[slot]
        self.waiting[slot] = False
        self.n_waiting[v] -= 1
        for u in members(self.waits_for.get(v, 0)):
            self.pending[u] -= 1
            if not self.pending[u]:
                self._uncache(u)

    def _uncache(self, v: int) -> None:
        if self.cached >> v & 1:
            self.cached &= ~(1 << v)
            copy = self.copies.pop(v)
            copy.cached = False
            if not copy.nodes:
                self.level_bytes -= self.machine.nbytes[v]

    def _let_go(self, slot: int) -> None:
        """The node of the slot drops what it asked for."""
        v, copy = self.asked.pop(slot, (-1, None))
        if copy is not None:
            copy.nodes -= 1
            if not copy.nodes and not copy.cached:
                self.level_bytes -= self.machine.nbytes[v]

    # Sweeping ---------------------------------------------------------------------------------------------------------

    def _sweep(self, target: int) -> tuple[tuple[int, int], ...]:
        """Make ``target``, and all that the same operators lead to and somebody waits for (``Program._plan_sweep``)."""
        machine = self.machine
        at_hand = self.held | self.cached
        run, wanted = self._plan(target, at_hand)
        order = list(members(run))
        cached = 0
        for k in order:
            cached |= machine.made_mask[k]
        cached &= (wanted | 1 << target) & ~at_hand
        trace = self._walk(order, cached, at_hand)
        for v in members(cached):
            self.copies[v] = _Copy()
            self.level_bytes += machine.nbytes[v]
        self.cached |= cached
        self._wait(wanted)
        for v in list(members(self.cached)):
            if v not in self.pending and v != target:
                self._uncache(v)
        self.replayed += len(order)
        for k in order:
            self.replay_s += machine.run_s[k]
        return trace

    def _plan(self, target: int, at_hand: int) -> tuple[int, int]:
        """(operators to run, values that somebody waits for), as bits."""
        machine = self.machine
        run, _ = machine.needs(target, at_hand)
        wanted = 0
        for v, n in enumerate(self.n_waiting):
            if n:
                wanted |= 1 << v
        made = 0
        for k in members(run):
            made |= machine.made_mask[k]
        made &= wanted
        rest = list(members(wanted & ~at_hand))
        grew = True
        while grew:
            grew = False
            left = []
            for v in rest:
                if made >> v & 1:
                    continue
                if not machine.ops_before[v] & run:
                    left.append(v)
                    continue
                needed, _ = machine.needs(v, at_hand | made)
                if needed & run:  # it would run again what this sweep runs: take it along
                    run |= needed
                    for k in members(needed):
                        made |= machine.made_mask[k] & wanted
                    grew = True
                else:
                    left.append(v)
            rest = left
        return run, wanted

    def _walk(self, order: list[int], cached: int, at_hand: int) -> tuple[tuple[int, int], ...]:
        """Run the sweep's operators; for each its index and the tape bytes at its highest (``Program._schedule``)."""
        machine = self.machine
        nbytes = machine.nbytes
        last: dict[int, int] = {}
        for k in order:
            for v in machine.reads[k]:
                if v in last:
                    last[v] = k
            for v in machine.made[k]:
                if not at_hand >> v & 1:
                    last[v] = k
        level = self.level_bytes
        trace = []
        for k in order:
            highest = level + machine.fresh_bytes[k] + machine.transient_bytes[k]
            for old, new, needed in machine.program.operators[k].writes:
                if needed and last.get(old) == k and not cached >> old & 1:
                    highest -= nbytes[new]  # ours, at its last use: written in place
            trace.append((k, highest))
            for v in machine.made[k]:
                if v in last:
                    level += nbytes[v]
                    if last[v] == k and not cached >> v & 1:
                        level -= nbytes[v]
            for v in machine.reads[k]:
                if last.get(v) == k and not cached >> v & 1:
                    level -= nbytes[v]
        return tuple(trace)

    def _wait(self, wanted: int) -> None:
        """Who waits for which cached value from now on."""
        machine = self.machine
        at_hand = self.held | self.cached
        self.pending, self.waits_for = {}, {}
        for v in members(wanted & ~self.held):
            on = 1 << v & self.cached
            if not on and machine.values_before[v] & self.cached:
                _, leaves = machine.needs(v, at_hand)
                on = leaves & self.cached
            if on:
                self.waits_for[v] = on
                for u in members(on):
                    self.pending[u] = self.pending.get(u, 0) + self.n_waiting[v]


def mask_of(numbers: Iterable[int]) -> int:
    """A set of small numbers as the bits of one integer."""
    mask = 0
    for i in numbers:
        mask |= 1 << i
    return mask


def members(mask: int) -> Iterator[int]:
    """The numbers of a set of bits, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
