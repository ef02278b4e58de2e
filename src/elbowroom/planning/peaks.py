"""The bytes of a step as whole numbers in the choices of its calls: one row for each moment that could be the peak.

    row = constant + sum over calls of bytes[row, the option picked] - storages that two of them hold

Every row is at most what ``simulate`` finds at its moment, and the highest row is its peak: the rows say the same in
a form that a linear solver reads. They are exact integers, so that answers of a solver can be checked at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elbowroom.planning.options import Option
from elbowroom.planning.profile import BACKWARD, FORWARD, RELEASE, ProgramProfile, StepProfile
from elbowroom.planning.tapes import CallRun, Interpreter, mask_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_KEPT, _LEFT, _OWN = "kept", "left", "own"
_Holder = tuple[int, str, int, int]  # call; its tape's state; while it runs: shared values it may hold, those it does


class Shared(NamedTuple):
    """A storage that several calls may hold at once: counted once, ``nbytes`` each for the others.

    ``members``: for each of these calls, the columns of the options under which it is held.
    """

    nbytes: int
    members: tuple[Ints, ...]


@dataclass(frozen=True)
class Peaks:
    """The rows of a step. Columns are (call, option) pairs; those of call ``c`` begin at ``first[c]``.

    ``nbytes`` (rows, columns) and ``constant`` (rows): bytes. ``shared``: storages that several calls may hold;
    ``holds`` (shared, columns): 1 where an option holds it; ``discount`` (rows, shared): bytes that come off for each
    holder but one. ``extra_s``, ``kept_bytes``: of each column.
    """

    options: tuple[tuple[Option, ...], ...]
    first: Ints
    nbytes: Ints
    constant: Ints
    shared: tuple[Shared, ...]
    holds: Ints
    discount: Ints
    extra_s: Floats
    kept_bytes: Ints

    def columns(self, picks: Ints) -> Ints:
        """The columns of one option for each call."""
        return self.first[:-1] + picks

    def rows(self, picks: Ints) -> Ints:
        """The bytes of each row, resting bytes included."""
        columns = self.columns(picks)
        total: Ints = self.constant + self.nbytes[:, columns].sum(axis=1)
        if self.shared:
            total -= self.discount @ np.maximum(self.holds[:, columns].sum(axis=1) - 1, 0)
        return total

    def part(self, rows: Ints) -> Peaks:
        """Of these rows only."""
        return replace(self, nbytes=self.nbytes[rows], constant=self.constant[rows], discount=self.discount[rows])

    def above(self, budget_bytes: int) -> Ints:
        """The rows that do not stay within the budget whatever is picked."""
        highest = np.maximum.reduceat(self.nbytes, self.first[:-1], axis=1).sum(axis=1) + self.constant
        return np.flatnonzero(highest > budget_bytes)

    def extra(self, picks: Ints) -> float:
        """Extra seconds of the step."""
        return float(self.extra_s[self.columns(picks)].sum())

    def kept(self, picks: Ints) -> int:
        """Kept bytes of all calls, added up."""
        return int(self.kept_bytes[self.columns(picks)].sum())

    def peak_bytes(self, picks: Ints) -> int:
        """The highest row; 0 without rows."""
        return int(self.rows(picks).max(initial=0))

    def chosen(self, picks: Ints) -> tuple[Option, ...]:
        """The options themselves."""
        return tuple(options[i] for options, i in zip(self.options, picks.tolist(), strict=True))


def peaks_of(step: StepProfile, options: Sequence[Sequence[Option]]) -> Peaks:
    """The rows of ``step`` with ``options[p]`` for its program number ``p``."""
    return _Builder(step, options).build()


class _Builder:
    def __init__(self, step: StepProfile, options: Sequence[Sequence[Option]]) -> None:
        self.step = step
        self.options = [tuple(options[call.program]) for call in step.calls]
        self.first = np.cumsum([0] + [len(o) for o in self.options])
        self.machines: dict[int, Interpreter] = {}
        self.runs: dict[tuple[int, int], CallRun] = {}
        self.ever_held: dict[int, int] = {}  # per program: values that some option holds, as bits
        self.courses: dict[tuple[int, int, int], dict[int, int]] = {}
        known: dict[int, list[int]] = {}
        for c, call in enumerate(step.calls):
            for storage in {s for v, s in call.storages if step.programs[call.program].values[v].nbytes}:
                known.setdefault(storage, []).append(c)
        self.sharers = {s: calls for s, calls in known.items() if len(calls) > 1}
        self.sharers = {s: calls for s, calls in self.sharers.items() if self._is_held(s, calls)}
        # Per call: value -> storage, of those that another call knows, too. One value a storage: the first.
        self.storages: list[dict[int, int]] = []
        for call in step.calls:
            values = step.programs[call.program].values
            of: dict[int, int] = {}
            for v, s in call.storages:
                if s in self.sharers and s not in of.values() and values[v].nbytes:
                    of[v] = s
            self.storages.append(of)
        self.leaves = [not _lets_go_of_all(p) for p in step.programs]
        self.coefficients: list[Ints] = []
        self.constants: list[int] = []
        self.discounts: list[dict[int, int]] = []
        self.shared: dict[tuple[object, ...], tuple[int, list[tuple[Ints, int]]]] = {}
        self.groups: list[Shared] = []

    def _is_held(self, storage: int, calls: list[int]) -> bool:
        """Whether two of the calls hold the storage under some option."""
        n = 0
        for c in calls:
            p = self.step.calls[c].program
            if p not in self.ever_held:
                self.ever_held[p] = 0
                for o in range(len(self.options[c])):
                    self.ever_held[p] |= self._run(c, o).held
            n += any(s == storage and self.ever_held[p] >> v & 1 for v, s in self.step.calls[c].storages)
        return n > 1

    def build(self) -> Peaks:
        step = self.step
        last_backward = {m.call: i for i, m in enumerate(step.moments) if m.kind == BACKWARD}
        base = np.zeros(self.first[-1], dtype=np.int64)  # what the live tapes hold
        state: dict[int, str] = {}
        for i, moment in enumerate(step.moments):
            c = moment.call
            if moment.kind == FORWARD:
                own = self._column(c, [o.forward_bytes for o in self.options[c]])
                self._row(moment.level_bytes, base + own, state)
                base += self._column(c, [o.kept_bytes for o in self.options[c]])
                state[c] = _KEPT
            elif moment.kind == BACKWARD:
                self._backward(moment.level_bytes, c, base, state)
                if last_backward[c] == i:
                    del state[c]
                    base -= self._column(c, [o.kept_bytes for o in self.options[c]])
                    if self.leaves[step.calls[c].program]:
                        state[c] = _LEFT
                        base += self._column(c, [self._run(c, o).left_bytes for o in range(len(self.options[c]))])
            else:
                self._row(max(moment.level_bytes, moment.peak_bytes), base.copy(), state)
        return self._pack()

    def _pack(self) -> Peaks:
        kept = [o.kept_bytes for options in self.options for o in options]
        extra = [o.extra_s for options in self.options for o in options]
        discount = np.zeros((len(self.constants), len(self.groups)), dtype=np.int64)
        for r, of in enumerate(self.discounts):
            for g, nbytes in of.items():
                discount[r, g] = nbytes
        matrix = np.array(self.coefficients, dtype=np.int64).reshape(len(self.constants), int(self.first[-1]))
        holds = np.zeros((len(self.groups), int(self.first[-1])), dtype=np.int64)
        for g, group in enumerate(self.groups):
            holds[g, np.concatenate(group.members)] = 1
        return Peaks(
            tuple(self.options), self.first, matrix, np.array(self.constants, dtype=np.int64),
            tuple(self.groups), holds, discount, np.array(extra, dtype=np.float64), np.array(kept, dtype=np.int64),
        )  # fmt: skip

    def _column(self, c: int, numbers: Sequence[int]) -> Ints:
        column = np.zeros(self.first[-1], dtype=np.int64)
        column[self.first[c] : self.first[c + 1]] = numbers
        return column

    def _row(
        self, level_bytes: int, coefficients: Ints, state: dict[int, str], own: tuple[int, int, int] | None = None
    ) -> None:
        """One row; ``own``: the call whose backward runs, the shared values that it may hold, those it does here."""
        self.coefficients.append(coefficients)
        self.constants.append(self.step.resting_bytes + level_bytes)
        discounts: dict[int, int] = {}
        for storage, calls in self.sharers.items():
            who: list[_Holder] = [(c, state[c], 0, 0) for c in calls if c in state and (own is None or c != own[0])]
            if own is not None and own[2] & self._mask(own[0], storage):
                who.append((own[0], _OWN, own[1], own[2]))
            if len(who) > 1:
                g, folded = self._group(storage, tuple(who))
                for columns, nbytes in folded:
                    coefficients[columns] -= nbytes
                if g >= 0:
                    discounts[g] = self.groups[g].nbytes
        self.discounts.append(discounts)

    def _group(self, storage: int, who: tuple[_Holder, ...]) -> tuple[int, list[tuple[Ints, int]]]:
        """The number of the group of holders (-1: no two of them), and what else comes off: (columns, bytes).

        Who follows a call that holds the storage under all its options never pays for it: that is no group's matter.
        """
        key = (storage, who)
        if key not in self.shared:
            members, sizes, folded = [], [], []
            is_sure = False
            for holder in who:
                c = holder[0]
                v = (self._mask(c, storage)).bit_length() - 1
                holds = [o for o in range(len(self.options[c])) if self._holds(o, v, holder)]
                if holds:
                    columns = self.first[c] + np.array(holds, dtype=np.int64)
                    sizes.append(self.step.program_of(c).values[v].nbytes)
                    if is_sure:
                        folded.append(columns)
                    else:
                        members.append(columns)
                    is_sure |= len(holds) == len(self.options[c])
            nbytes = min(sizes, default=0)
            number = -1
            if len(members) > 1:
                number = len(self.groups)
                self.groups.append(Shared(nbytes, tuple(members)))
            self.shared[key] = (number, [(columns, nbytes) for columns in folded])
        return self.shared[key]

    def _mask(self, c: int, storage: int) -> int:
        """The value (as a bit) of a call that is in a storage that others know, too; 0 if none is."""
        return mask_of(v for v, s in self.storages[c].items() if s == storage)

    def _holds(self, o: int, v: int, holder: _Holder) -> bool:
        c, state, shares, pattern = holder
        if state == _OWN:
            return pattern in self._backward_peaks(c, o, shares)
        run = self._run(c, o)
        held = run.held if state == _KEPT or not run.course else run.course[-1].held
        return bool(held >> v & 1)

    def _backward(self, level_bytes: int, c: int, base: Ints, state: dict[int, str]) -> None:
        """A row for each set of shared values that the call still holds at some event of its backward."""
        others = base - self._column(c, [o.kept_bytes for o in self.options[c]])
        shares = 0
        for v, s in self.storages[c].items():
            if any(other in state for other in self.sharers[s] if other != c):
                shares |= 1 << v
        if not shares:
            whole = self._column(c, [o.kept_bytes + o.working_bytes for o in self.options[c]])
            self._row(level_bytes, others + whole, state, (c, 0, 0))
            return
        highest = [self._backward_peaks(c, o, shares) for o in range(len(self.options[c]))]
        for pattern in sorted({p for h in highest for p in h}):
            own = self._column(c, [h.get(pattern, 0) for h in highest])
            self._row(level_bytes, others + own, state, (c, shares, pattern))

    def _backward_peaks(self, c: int, o: int, shares: int) -> dict[int, int]:
        """The highest bytes of a call's backward (its own tape and base), for each part of ``shares`` that it holds."""
        key = (self.step.calls[c].program, o, shares)
        if key in self.courses:
            return self.courses[key]
        run = self._run(c, o)
        held = run.held & shares
        highest = self.courses[key] = {held: run.kept_bytes}
        for event, passage in zip(self.step.program_of(c).events, run.course, strict=True):
            before = event.level_bytes + max(passage.before_bytes, passage.highest_bytes)
            highest[held] = max(highest.get(held, 0), before)
            held = passage.held & shares
            highest[held] = max(highest.get(held, 0), event.peak_bytes + passage.after_bytes)
        return highest

    def _run(self, c: int, o: int) -> CallRun:
        """The call under its option number ``o``; equal for calls of the same program."""
        p = self.step.calls[c].program
        if (p, o) not in self.runs:
            if p not in self.machines:
                self.machines[p] = Interpreter(self.step.programs[p], self.step.costs)
            option = self.options[c][o]
            self.runs[p, o] = self.machines[p].run(None if option.plain else option.keep)
        return self.runs[p, o]


def _lets_go_of_all(program: ProgramProfile) -> bool:
    released = {e.slot for e in program.events if e.kind == RELEASE}
    return all(v < 0 or slot in released for slot, v in enumerate(program.slots))
