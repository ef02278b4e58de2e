"""The menu of one program: which sets of kept values are worth considering, and what each takes.

Keeping a value costs bytes, replaying an operator costs seconds. At a price of λ seconds per byte the best set is a
minimum cut (``_Cut``), and the sets that are best at some price are the lower hull of (kept bytes, extra seconds):
no set lies below it. A step's peak is not made of kept bytes alone, though: while a call's own backward runs, what it
replays is there as well. So each menu also has sets that keep a little more and replay in shorter sweeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from elbowroom.planning.profile import MADE, EngineCosts, ProgramProfile, StepProfile
from elbowroom.planning.tapes import CallRun, Interpreter, mask_of, members

_T = TypeVar("_T")

#: Options of one menu at most: the hull first, then what lowers the working set most.
MAX_OPTIONS = 48

#: Prices of which the cuts are searched in one call of the solver: its overhead is that of several cuts.
_BATCH = 8

#: Corners that are below the line between their neighbours by less than this part of all seconds are not looked for.
_SLACK = 1e-3

#: Of so many hull points the sweeps are split; between them a menu interpolates well enough.
_SPLIT_POINTS = 6


@dataclass(frozen=True)
class Option:
    """One way to run a region call. Bytes are tape and base bytes together, as ``simulate`` counts them.

    ``kept_bytes``: held from the end of the forward to the beginning of the backward. ``forward_bytes`` and
    ``working_bytes``: the highest of the call's forward and of its backward, beyond what was there when that began
    (``working_bytes`` is on top of ``kept_bytes``; both may be 0, neither is negative). ``extra_s``: beyond a plain
    call. ``replayed``: operators run in backward.
    """

    plain: bool
    keep: frozenset[int]
    kept_bytes: int
    forward_bytes: int
    working_bytes: int
    extra_s: float
    replayed: int


# Public verbs --------------------------------------------------------------------------------------------------------


def menu(
    program: ProgramProfile, costs: EngineCosts, *, shared: Iterable[int] = (), max_options: int = MAX_OPTIONS
) -> tuple[Option, ...]:
    """What to choose from for a call of ``program``: cheapest in seconds first.

    Plain is always among them, and so are the sets with the least kept and with the least kept and working bytes. What
    another option beats in every respect is left out. ``shared``: made values whose storage other calls hold, too
    (``menus_of`` finds them); keeping one may cost nothing, so there are options for that price as well.
    """
    kitchen = _Kitchen(program, costs, mask_of(shared))
    corners = [corner.keep for corner in kitchen.hull(free=0, slack=_SLACK)]
    if kitchen.shared:
        corners += [corner.keep for corner in kitchen.hull(free=kitchen.shared, slack=_SLACK)]
    for keep in corners:
        kitchen.cook(keep)
    with_replays = [keep for keep in dict.fromkeys(corners) if kitchen.cook(keep).replayed]
    with_replays.sort(key=lambda keep: kitchen.cook(keep).kept_bytes)
    for i, keep in enumerate(_spread(with_replays, _SPLIT_POINTS)):
        kitchen.split_sweeps(keep, rounds=6 if i == 0 else 2)
    return kitchen.serve(max_options)


def menus_of(step: StepProfile, *, max_options: int = MAX_OPTIONS) -> tuple[tuple[Option, ...], ...]:
    """The menu of each program of the step, with what its calls share with others taken into account."""
    read_as_source: set[int] = set()
    for call in step.calls:
        values = step.programs[call.program].values
        read_as_source |= {storage for v, storage in call.storages if values[v].kind != MADE}
    shared: list[set[int]] = [set() for _ in step.programs]
    for call in step.calls:
        values = step.programs[call.program].values
        shared[call.program] |= {
            v for v, storage in call.storages if values[v].kind == MADE and storage in read_as_source
        }
    return tuple(
        menu(program, step.costs, shared=own, max_options=max_options)
        for program, own in zip(step.programs, shared, strict=True)
    )


def lower_hull(program: ProgramProfile, costs: EngineCosts) -> list[Corner]:
    """All corners of the lower hull of (kept bytes, seconds of replaying) over all keep sets, least bytes first."""
    return _Kitchen(program, costs, 0).hull(free=0)


# The hull ------------------------------------------------------------------------------------------------------------


class MinimumCut:
    """The best keep sets at given prices: a linear program whose corners are all whole.

    Variables: k_v, whether value v is held; r_n, whether operator n is replayed, all from 0 to 1. Minimise
    Σ t_n r_n + λ Σ b_v k_v so that

        k_v + r_maker(v) ≥ 1      for every saved value v
        k_v + r_maker(v) ≥ r_n    for every value v that operator n reads

    where the terms that are not there (no maker that could be replayed; values that are held anyway) are left out. Each
    row says that if one side of an arc is in the cut's far part, so is the other: the dual of a maximum flow (Ford and
    Fulkerson 1956), totally unimodular. ``matrix`` has those rows; columns are the values, then the operators.
    """

    def __init__(self, interpreter: Interpreter) -> None:
        program = interpreter.program
        self.interpreter = interpreter
        self.n_values = len(program.values)
        rows: list[tuple[int, int, int]] = []  # value, its operator's column or -1, the reader's column or -1
        anyway = interpreter.parameters | interpreter.saved & ~interpreter.is_made
        needed = interpreter.saved
        for k in range(len(program.operators) - 1, -1, -1):
            if interpreter.made_mask[k] & needed & interpreter.is_made:
                needed |= interpreter.read_mask[k]
                rows += [(v, self._maker(v), self.n_values + k) for v in members(interpreter.read_mask[k] & ~anyway)]
        rows += [(v, self._maker(v), -1) for v in members(interpreter.saved & ~anyway)]
        self.lower: NDArray[np.float64] = np.array([0.0 if reader >= 0 else 1.0 for _, _, reader in rows])
        holdable = interpreter.keepable | ~interpreter.is_made
        entries = [
            (i, column, sign)
            for i, (v, maker, reader) in enumerate(rows)
            for column, sign in ((v if holdable >> v & 1 else -1, 1.0), (maker, 1.0), (reader, -1.0))
            if column >= 0
        ]
        shape = (len(rows), self.n_values + len(program.operators))
        i, j, x = zip(*entries, strict=True) if entries else ((), (), ())
        self.matrix: Any = sparse.csc_array((x, (i, j)), shape=shape)
        self._blocks: dict[int, Any] = {1: self.matrix}

    def _maker(self, v: int) -> int:
        return self.n_values + self.interpreter.maker[v] if self.interpreter.is_made >> v & 1 else -1

    def solve(self, prices: Sequence[float], free: int) -> NDArray[np.float64]:
        """For each price the optimal variables, in a row each. Values of ``free`` cost nothing to keep."""
        nbytes = np.array([0 if free >> v & 1 else n for v, n in enumerate(self.interpreter.nbytes)], dtype=float)
        seconds = np.array(self.interpreter.run_s)
        costs = [np.concatenate([price * nbytes, seconds]) for price in prices]
        costs = [c / max(c.max(initial=0.0), 1e-300) * 1e3 for c in costs]  # the solver's tolerances are absolute
        count = len(prices)
        if not self.lower.size:
            return np.zeros((count, len(costs[0])))
        found = milp(  # without whole variables: HiGHS solves it as a linear program, with less ado than linprog
            np.concatenate(costs),
            constraints=LinearConstraint(self._side_by_side(count), np.tile(self.lower, count), np.inf),
            bounds=Bounds(0, 1),
            options={"presolve": False},  # takes longer than it spares
        )
        assert found.x is not None, found.message
        return np.asarray(found.x).reshape(count, -1)

    def _side_by_side(self, count: int) -> Any:
        if count not in self._blocks:
            self._blocks[count] = sparse.block_diag([self.matrix] * count, format="csc")
        return self._blocks[count]


class Corner(NamedTuple):
    """A set of kept values (as bits), the bytes it holds between forward and backward, the seconds of its replays."""

    keep: int
    nbytes: int
    seconds: float


class _Found:
    """The sets found so far, and at which prices each of them is known to be best."""

    def __init__(self) -> None:
        self.points: set[Corner] = set()
        self.best_at: dict[int, tuple[float, float]] = {}  # keep -> lowest and highest price

    def add(self, point: Corner, price: float | None = None) -> None:
        """A set; with ``price``: no other one is better at that price."""
        self.points.add(point)
        if price is not None:
            least = point.seconds + price * point.nbytes
            for p in self.points:
                if p.seconds + price * p.nbytes <= least * (1 + 1e-12):
                    low, high = self.best_at.get(p.keep, (price, price))
                    self.best_at[p.keep] = (min(low, price), max(high, price))

    def corners(self) -> list[Corner]:
        """The lower hull of the points, ascending in bytes, without those on its edges."""
        corners: list[Corner] = []
        for point in sorted(self.points, key=lambda p: (p.nbytes, p.seconds, p.keep)):
            if corners and point.seconds >= corners[-1].seconds * (1 - 1e-12):
                continue  # more bytes, and no faster
            while len(corners) > 1:
                a, b = corners[-2:]
                line = a.seconds + (point.seconds - a.seconds) * ((b.nbytes - a.nbytes) / (point.nbytes - a.nbytes))
                if b.seconds < line - 1e-12 * a.seconds:
                    break
                corners.pop()
            corners.append(point)
        return corners

    def room_below(self, a: Corner, b: Corner) -> float:
        """By how many seconds a corner may still be below the line from ``a`` to ``b``.

        At a price at which ``a`` is best, the hull is above the line of that slope through ``a``; likewise ``b``. The
        two lines meet at the lowest place where a corner can be.
        """
        if a.keep not in self.best_at or b.keep not in self.best_at:
            return float("inf")
        steep, shallow = self.best_at[a.keep][0], self.best_at[b.keep][1]
        width, drop = b.nbytes - a.nbytes, a.seconds - b.seconds
        if steep <= shallow:
            return 0.0
        return (steep - drop / width) * (drop - shallow * width) / (steep - shallow)


class _Kitchen:
    """Makes one menu: the hull, what each set takes, sets with shorter sweeps."""

    def __init__(self, program: ProgramProfile, costs: EngineCosts, shared: int) -> None:
        self.interpreter = Interpreter(program, costs)
        needed = 0
        for v in program.saved:
            needed |= self.interpreter.values_before[v]
        self.shared = shared & needed & self.interpreter.keepable
        self.cut = MinimumCut(self.interpreter)
        self.runs: dict[int, CallRun] = {}
        self.plain = self.interpreter.run(None)

    def hull(self, free: int, slack: float = 0.0) -> list[Corner]:
        """The hull's corners, ascending in bytes; values of ``free`` cost nothing to keep.

        Starts with the hull's two ends, and asks for the best set at the price at which two neighbours are equal, until
        nothing below the line between them can be left. With ``slack``, corners are left out that are below it by less
        than this part of all the seconds that could be replayed.
        """
        at = self.interpreter
        everything, nothing = self._corner(at.saved & at.keepable, free), self._corner(0, free)
        total_s, whole = nothing.seconds, everything.nbytes
        found = _Found()
        found.add(everything)
        found.add(nothing)
        prices = [2 * (total_s + 1e-9)] + ([total_s / whole] if whole else [])  # at first: a byte less is worth it all
        settled: set[tuple[int, int]] = set()
        while prices:
            for price, row in zip(prices, self.cut.solve(prices, free), strict=True):
                keep = mask_of(int(v) for v in np.flatnonzero(row[: self.cut.n_values] > 0.5)) & at.keepable
                found.add(self._corner(keep, free), price)
            edges = [(a, b) for a, b in pairwise(found.corners()) if (a.keep, b.keep) not in settled]
            if slack:
                edges = [(a, b) for a, b in edges if found.room_below(a, b) > slack * total_s]
            edges = edges[:_BATCH]
            settled |= {(a.keep, b.keep) for a, b in edges}
            prices = [(a.seconds - b.seconds) / (b.nbytes - a.nbytes) for a, b in edges]
        return found.corners()

    def _corner(self, keep: int, free: int) -> Corner:
        """What keeping ``keep`` takes by the cut's own account; values that nothing needs are left out of it."""
        at = self.interpreter
        at_hand = ~at.is_made | keep
        need, seconds = at.saved, 0.0
        for k in range(len(at.made) - 1, -1, -1):
            if at.made_mask[k] & need & ~at_hand:
                need |= at.read_mask[k]
                seconds += at.run_s[k]
        held = need & at_hand
        return Corner(held & at.keepable, sum(at.nbytes[v] for v in members(held & ~free)), seconds)

    def cook(self, keep: int) -> CallRun:
        """What keeping ``keep`` takes."""
        run = self.runs.get(keep)
        if run is None:
            run = self.runs[keep] = self.interpreter.run(members(keep))
        return run

    # Shorter sweeps -----------------------------------------------------------------------------------------------

    def split_sweeps(self, keep: int, rounds: int) -> None:
        """Keep what crosses the middle of the highest sweep, too, as long as that lowers the peak of the backward."""
        run = self.cook(keep)
        for _ in range(rounds):
            wider = [keep | cut for cut in self._best_cuts(keep, run)]
            if not wider:
                return
            best = min(wider, key=lambda k: _height(self.cook(k)))
            if _height(self.cook(best)) >= 0.99 * _height(run):
                return
            keep, run = best, self.cook(best)

    def _best_cuts(self, keep: int, run: CallRun) -> list[int]:
        """The most promising sets that cut a sweep in two: all that its first operators make for its later ones."""
        at = self.interpreter
        highest = max((p for p in run.course if p.sweep), key=lambda p: p.highest_bytes, default=None)
        if highest is None:
            return []
        order = [k for k, _ in highest.sweep]
        read_later = [0] * len(order)
        for i in range(len(order) - 1, 0, -1):
            read_later[i - 1] = read_later[i] | at.read_mask[order[i]]
        fresh = [at.made_mask[k] & at.is_made & ~keep for k in order]
        asked = [self._bytes(made & at.saved) for made in fresh]
        before, after = 0, sum(asked)
        made = 0
        guesses: dict[int, int] = {}
        for i in range(len(order) - 1):
            made |= fresh[i]
            before += asked[i]
            after -= asked[i]
            crossing = made & read_later[i] & at.keepable
            if crossing:
                guess = max(before, after) + self._bytes(crossing & ~at.saved)
                guesses[crossing] = min(guess, guesses.get(crossing, guess))
        return sorted(guesses, key=lambda c: guesses[c])[:3]

    def _bytes(self, values: int) -> int:
        return sum(self.interpreter.nbytes[v] for v in members(values))

    # The menu -----------------------------------------------------------------------------------------------------

    def serve(self, max_options: int) -> tuple[Option, ...]:
        """All that was cooked and plain, without what is beaten in every respect."""
        offers = [_Offer(None, self.plain, self._apart(self.plain))]
        offers += [_Offer(keep, run, self._apart(run)) for keep, run in self.runs.items()]
        offers = _unbeaten(offers)
        if len(offers) > max_options:
            offers = _thinned(offers, max_options)
        offers.sort(key=lambda o: (o.run.extra_s, o.run.kept_bytes))
        return tuple(o.option for o in offers)

    def _apart(self, run: CallRun) -> int:
        return run.kept_bytes - self._bytes(run.held & self.shared)


class _Offer(NamedTuple):
    """What may go on the menu. ``apart_bytes``: kept bytes that no other call can hold."""

    keep: int | None
    run: CallRun
    apart_bytes: int

    @property
    def option(self) -> Option:
        run = self.run
        keep = frozenset(members(self.keep or 0))
        return Option(
            self.keep is None, keep, run.kept_bytes, run.forward_bytes, run.working_bytes, run.extra_s, run.replayed
        )

    @property
    def terms(self) -> tuple[float, ...]:
        """What a step's constraints and its seconds depend on; less is better in each."""
        return (self.run.kept_bytes, self.apart_bytes, self.run.forward_bytes, _height(self.run), self.run.extra_s)


def _unbeaten(offers: list[_Offer]) -> list[_Offer]:
    """Without those that another one equals or beats in every term; the plain offer comes first and stays."""
    plain, *rest = offers
    kept = [plain]
    for offer in sorted(rest, key=lambda o: o.terms):  # nothing is beaten by what comes after it
        terms = offer.terms
        if not any(all(a <= b for a, b in zip(other.terms, terms, strict=True)) for other in kept):
            kept.append(offer)
    return kept


def _thinned(offers: list[_Offer], count: int) -> list[_Offer]:
    """At most ``count`` of them: plain, the two most frugal ones, and others evenly along their seconds."""
    musts = [offers[0], min(offers, key=lambda o: o.terms), min(offers, key=lambda o: (_height(o.run), o.terms))]
    musts = list({o.keep: o for o in musts}.values())
    others = [o for o in sorted(offers, key=lambda o: o.run.extra_s) if o.keep not in {m.keep for m in musts}]
    return musts + _spread(others, max(0, count - len(musts)))


def _height(run: CallRun) -> int:
    """The highest of a call's backward, beyond what there was without its tape."""
    return run.kept_bytes + run.working_bytes


def _spread(items: Sequence[_T], count: int) -> list[_T]:
    """``count`` of the items, evenly, first and last included."""
    if len(items) <= count:
        return list(items)
    if count < 2:
        return list(items[:count])
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
