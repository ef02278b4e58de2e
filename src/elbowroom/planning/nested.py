"""Steps whose calls nest like brackets: who ran forward last runs backward first. For them the best plan is found.

What a call keeps is there in its own rows and in those of the calls inside it, and nothing of these is there in its
own. So all that a call has to know of those around it is how many bytes they keep, and whether the next one around
already holds what both of them may hold. That makes the least peak a matter of bisection, and the cheapest plan one of
dynamic programming over that number of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elbowroom.planning.peaks import Floats, Ints, Peaks

#: Steps of the staircase ``_Stairs`` at most; beyond that they are made coarser, and the plan is not quite the best.
_MAX_STEPS = 4000

_ENDLESS = np.iinfo(np.int64).max // 4

# How calls nest ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Link:
    """What a call may hold together with the call around it: ``groups`` of ``Peaks.shared``.

    ``deep``: of each of them, the bytes that come off in the rows of the calls inside (0: only in the call's own).
    ``cases`` (cases, groups): which of them the call around holds, 1 or 0. ``case_of``: the case of each of its
    options.
    """

    groups: Ints
    deep: Ints
    cases: Ints
    case_of: Ints


@dataclass(frozen=True)
class Nest:
    """``order``: the calls by their forwards. ``parent[c]``: the call around call ``c``, -1 if none is; ``inside[c]``:
    those next inside it. ``own[c]``: rows in which it is the innermost. ``kept[c]``: what its options hold in the rows
    of those inside it. ``link[c]``: with its parent."""

    order: tuple[int, ...]
    parent: tuple[int, ...]
    inside: tuple[tuple[int, ...], ...]
    own: tuple[Ints, ...]
    kept: tuple[Ints, ...]
    link: tuple[_Link, ...]


def nest_of(peaks: Peaks) -> Nest | None:
    """How the calls of a step nest. None if they do not, or share storages with others than the call next around."""
    n_calls = len(peaks.options)
    present = np.maximum.reduceat(peaks.nbytes, peaks.first[:-1], axis=1) > 0
    begins = np.where(present.any(axis=0), present.argmax(axis=0), len(present))
    order = np.argsort(begins, kind="stable")
    ranks = np.empty(n_calls, dtype=np.int64)
    ranks[order] = np.arange(n_calls)
    by_rank = np.where(present, ranks, -1)
    innermost = by_rank.max(axis=1, initial=-1)
    own = [np.flatnonzero(innermost == ranks[c]) for c in range(n_calls)]
    parent, kept = [-1] * n_calls, []
    around = np.zeros((n_calls, n_calls), dtype=bool)
    for c in order.tolist():
        if not len(own[c]):
            continue
        others = present[own[c]].copy()
        others[:, c] = False
        around[c] = others[0]
        if not (others == around[c]).all():
            return None
        if around[c].any():
            parent[c] = int(order[by_rank[own[c][0]][around[c]].max()])
            outside = around[parent[c]].copy()
            outside[parent[c]] = True
            if not (outside == around[c]).all():
                return None
    for c in range(n_calls):
        inside = np.delete(peaks.nbytes[:, _span(peaks, c)], own[c], axis=0)
        inside = inside[inside.any(axis=1)]
        if len(inside) and not (inside == inside[0]).all():
            return None
        kept.append(inside[0] if len(inside) else np.zeros(len(peaks.options[c]), dtype=np.int64))
    links = _links(peaks, order, ranks, parent, around, innermost)
    if links is None:
        return None
    nested = tuple(tuple(i for i in range(n_calls) if parent[i] == c) for c in range(n_calls))
    return Nest(tuple(order.tolist()), tuple(parent), nested, tuple(own), tuple(kept), links)


def _links(
    peaks: Peaks, order: Ints, ranks: Ints, parent: list[int], around: NDArray[np.bool_], innermost: Ints
) -> tuple[_Link, ...] | None:
    """What each call shares with its parent; None if a storage is shared in any other way."""
    n_calls = len(peaks.options)
    inner = []  # per group: the call inside
    for shared in peaks.shared:
        calls = sorted(
            (int(np.searchsorted(peaks.first, m[0], side="right")) - 1 for m in shared.members), key=ranks.__getitem__
        )
        if len(calls) != 2 or parent[calls[1]] != calls[0]:
            return None
        inner.append(calls[1])
    of_call = [np.array([g for g, c in enumerate(inner) if c == own], dtype=np.int64) for own in range(n_calls)]
    counted = peaks.discount > 0
    is_deep = np.zeros(len(inner), dtype=bool)
    for g, c in enumerate(inner):
        is_deep[g] = bool((counted[:, g] & (innermost != ranks[c])).any())
    deep_of = np.zeros((n_calls, len(inner)), dtype=bool)
    for g, c in enumerate(inner):
        deep_of[c, g] = is_deep[g]
    for r, rank in enumerate(innermost.tolist()):
        if rank < 0:
            continue
        c = int(order[rank])
        outer = counted[r].copy()
        outer[of_call[c]] = False
        if not (outer == deep_of[around[c]].any(axis=0)).all():
            return None
    nbytes = np.array([s.nbytes for s in peaks.shared], dtype=np.int64)
    links = []
    for c, groups in enumerate(of_call):
        held = peaks.holds[groups][:, _span(peaks, parent[c])] if parent[c] >= 0 else np.zeros((0, 1), dtype=np.int64)
        cases, case_of = np.unique(held.T, axis=0, return_inverse=True)
        links.append(_Link(groups, nbytes[groups] * is_deep[groups], cases, case_of.reshape(-1)))
    return tuple(links)


def _span(peaks: Peaks, c: int) -> slice:
    return slice(int(peaks.first[c]), int(peaks.first[c + 1]))


def _own_rows(peaks: Peaks, nest: Nest, c: int, case: int) -> Ints:
    """(rows, options): the bytes of a call's own rows, without what the calls around it keep."""
    own, link = nest.own[c], nest.link[c]
    rows: Ints = peaks.constant[own, None] + peaks.nbytes[own, _span(peaks, c)]
    if len(link.groups):
        held = link.cases[case][:, None] * peaks.holds[link.groups][:, _span(peaks, c)]
        rows = rows - peaks.discount[own][:, link.groups] @ held
    return rows


def _kept(peaks: Peaks, nest: Nest, c: int, case: int) -> Ints:
    """What each option of a call adds to the rows of the calls inside it."""
    link = nest.link[c]
    if not len(link.groups):
        return nest.kept[c]
    held = peaks.holds[link.groups][:, _span(peaks, c)]
    adds: Ints = nest.kept[c] - (link.deep * link.cases[case]) @ held
    return adds


def _without_calls(peaks: Peaks) -> int:
    """The highest of the rows in which no call has any bytes."""
    return int(peaks.constant[~peaks.nbytes.any(axis=1)].max(initial=0))


def _cases_inside(nest: Nest, c: int, n_options: int) -> list[tuple[Ints, tuple[int, ...]]]:
    """The options of a call by what they mean for those next inside it: (options, the case of each of these)."""
    if all(len(nest.link[i].cases) == 1 for i in nest.inside[c]):
        return [(np.arange(n_options), (0,) * len(nest.inside[c]))]
    of = np.stack([nest.link[i].case_of for i in nest.inside[c]], axis=1)
    kinds, kind_of = np.unique(of, axis=0, return_inverse=True)
    return [(np.flatnonzero(kind_of.reshape(-1) == k), tuple(kind.tolist())) for k, kind in enumerate(kinds)]


# The least peak ------------------------------------------------------------------------------------------------------


def most_frugal(peaks: Peaks, nest: Nest) -> Ints:
    """The picks of the least peak of all. The least limit is found by bisection, see ``_rooms``."""
    table = _Frugal(peaks, nest)
    low, high = -1, int(peaks.rows(np.zeros(len(nest.order), dtype=np.int64)).max(initial=0))
    picks = table.within(high)
    while high - low > 1:
        middle = (low + high) // 2
        found = table.within(middle)
        if found is None:
            low = middle
        else:
            picks, high = found, min(middle, peaks.peak_bytes(found))
    assert picks is not None
    return picks


class _Frugal:
    """Which limits can be kept to. A call leaves room for those around it: at most the limit less its own rows, and the
    room that those inside it leave less what it keeps."""

    def __init__(self, peaks: Peaks, nest: Nest) -> None:
        self.peaks, self.nest = peaks, nest
        self.kinds = [_cases_inside(nest, c, len(o)) for c, o in enumerate(peaks.options)]
        cases = [range(len(link.cases)) for link in nest.link]
        self.own = [[_own_rows(peaks, nest, c, h).max(axis=0, initial=0) for h in of] for c, of in enumerate(cases)]
        self.kept = [[_kept(peaks, nest, c, h) for h in of] for c, of in enumerate(cases)]
        self.without = _without_calls(peaks)

    def within(self, limit_bytes: int) -> Ints | None:
        """Picks with every row within the limit; None if there are none."""
        if self.without > limit_bytes:
            return None
        nest = self.nest
        rooms: list[list[Ints]] = [[] for _ in nest.order]  # per call and case: the room that each option leaves
        for c in reversed(nest.order):
            for own, kept in zip(self.own[c], self.kept[c], strict=True):
                rooms[c].append(np.minimum(limit_bytes - own, self._room_inside(c, rooms) - kept))
        picks = np.zeros(len(nest.order), dtype=np.int64)
        around = [0] * len(nest.order)
        for c in nest.order:
            p = nest.parent[c]
            case = 0
            if p >= 0:
                case = int(nest.link[c].case_of[picks[p]])
                around[c] = around[p] + int(self.kept[p][self._case(p, picks)][picks[p]])
            fits = rooms[c][case] >= around[c]
            if not fits.any():
                return None
            picks[c] = np.argmax(rooms[c][case])
        return picks

    def _case(self, c: int, picks: Ints) -> int:
        p = self.nest.parent[c]
        return int(self.nest.link[c].case_of[picks[p]]) if p >= 0 else 0

    def _room_inside(self, c: int, rooms: list[list[Ints]]) -> Ints:
        """For each option of a call, the room that all those next inside it leave."""
        left = np.full(len(self.peaks.options[c]), _ENDLESS)
        for options, cases in self.kinds[c]:
            for i, case in zip(self.nest.inside[c], cases, strict=True):
                left[options] = np.minimum(left[options], rooms[i][case].max())
        return left


# The cheapest plan ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stairs:
    """The least extra seconds of a call and those inside it, over the bytes that the calls around it keep.

    Up to ``room[i]`` bytes (ascending) they take ``seconds[i]`` (ascending); above the last they do not fit.
    """

    room: Ints
    seconds: Floats

    def at(self, around_bytes: Ints) -> Floats:
        place = np.searchsorted(self.room, around_bytes)
        return np.append(self.seconds, np.inf)[place]


@dataclass(frozen=True)
class _Bound:
    """Extra seconds of a call and those inside it: at least ``base_s + price * bytes that the calls around keep``."""

    base_s: float
    price: float


class Cheapest:
    """The plan of least extra seconds within a budget, for a step that nests.

    ``prices``: seconds per byte of each row, not negative, as the duals of the relaxation. Any prices give lower bounds
    (Lagrange); with the duals these are so near that few steps of each staircase can still belong to a plan that is
    better than one already known, and the rest is dropped.
    """

    def __init__(self, peaks: Peaks, nest: Nest, budget_bytes: int, prices: Floats) -> None:
        self.peaks, self.nest = peaks, nest
        self.fits = _without_calls(peaks) <= budget_bytes
        self.extra_s = [peaks.extra_s[_span(peaks, c)] for c in range(len(nest.order))]
        self.kinds = [_cases_inside(nest, c, len(o)) for c, o in enumerate(peaks.options)]
        self.kept: list[list[Ints]] = [[] for _ in nest.order]
        self.room: list[list[Ints]] = [[] for _ in nest.order]
        self.bounds: list[list[_Bound]] = [[] for _ in nest.order]
        for c in reversed(nest.order):
            for case in range(len(nest.link[c].cases)):
                own = _own_rows(peaks, nest, c, case)
                kept = _kept(peaks, nest, c, case)
                self.room[c].append(budget_bytes - own.max(axis=0, initial=0))
                self.kept[c].append(kept)
                self.bounds[c].append(self._bound(c, kept, prices[nest.own[c]], own - budget_bytes))

    def _bound(self, c: int, kept: Ints, prices: Floats, own: Ints) -> _Bound:
        inside = self.nest.inside[c]
        price = sum(self.bounds[i][0].price for i in inside)
        total_s = self.extra_s[c] + prices @ own + price * kept
        for options, cases in self.kinds[c]:
            total_s[options] += sum(self.bounds[i][case].base_s for i, case in zip(inside, cases, strict=True))
        return _Bound(float(total_s.min()), price + float(prices.sum()))

    def plan(self, known_s: float) -> Ints | None:
        """The picks of the best plan, if that takes ``known_s`` or less; else those of another plan, or None."""
        if not self.fits:
            return None
        nest = self.nest
        above_s = known_s - sum(self.bounds[c][0].base_s for c in nest.order if nest.parent[c] < 0)
        above_s += 1e-9 * abs(known_s) if np.isfinite(known_s) else 0.0
        stairs: list[list[_Stairs | None]] = [[] for _ in nest.order]
        within: list[list[_Stairs | None]] = [[] for _ in nest.order]
        for c in reversed(nest.order):
            for _, cases in self.kinds[c]:
                within[c].append(_together([stairs[i][h] for i, h in zip(nest.inside[c], cases, strict=True)]))
            for case in range(len(nest.link[c].cases)):
                stairs[c].append(self._climbed(c, case, within[c], above_s))
        picks = np.zeros(len(nest.order), dtype=np.int64)
        around = [0] * len(nest.order)
        case_of = [0] * len(nest.order)
        for c in nest.order:
            p = nest.parent[c]
            if p >= 0:
                around[c] = around[p] + int(self.kept[p][case_of[p]][picks[p]])
                case_of[c] = int(nest.link[c].case_of[picks[p]])
            total_s = np.full(len(self.extra_s[c]), np.inf)
            kept = self.kept[c][case_of[c]]
            for (options, _), inside in zip(self.kinds[c], within[c], strict=True):
                if inside is not None:
                    total_s[options] = self.extra_s[c][options] + inside.at(around[c] + kept[options])
            total_s[around[c] > self.room[c][case_of[c]]] = np.inf
            picks[c] = np.lexsort((kept, total_s))[0]
            if total_s[picks[c]] == np.inf:
                return None
        return picks

    def _climbed(self, c: int, case: int, within: Sequence[_Stairs | None], above_s: float) -> _Stairs | None:
        """The staircase of a call from those of the calls inside it; None if no step is left."""
        bound = self.bounds[c][case]
        all_rooms, all_seconds = [], []
        for (options, _), inside in zip(self.kinds[c], within, strict=True):
            if inside is None:
                continue
            left = inside.room[None, :] - self.kept[c][case][options][:, None]
            rooms = np.minimum(left, self.room[c][case][options][:, None]).ravel()
            seconds = (inside.seconds[None, :] + self.extra_s[c][options][:, None]).ravel()
            hopeful = (rooms >= 0) & (seconds - bound.base_s - bound.price * rooms <= above_s)
            all_rooms.append(rooms[hopeful])
            all_seconds.append(seconds[hopeful])
        if not any(map(len, all_rooms)):
            return None
        return _stairs(np.concatenate(all_rooms), np.concatenate(all_seconds))


def _stairs(rooms: Ints, seconds: Floats) -> _Stairs:
    """The steps that no other beats."""
    order = np.lexsort((seconds, -rooms))
    rooms, seconds = rooms[order], seconds[order]
    best = np.minimum.accumulate(seconds)
    better = np.append(True, seconds[1:] < best[:-1])
    rooms, seconds = rooms[better][::-1], seconds[better][::-1]
    if len(rooms) > _MAX_STEPS:
        width_s = (seconds[-1] - seconds[0]) / (_MAX_STEPS / 2)
        last = np.append(np.diff(np.floor(seconds / width_s)) > 0, True)
        rooms, seconds = rooms[last], seconds[last]
    return _Stairs(rooms, seconds)


def _together(parts: list[_Stairs | None]) -> _Stairs | None:
    """Of calls side by side within one: their seconds add up."""
    total = _Stairs(np.array([_ENDLESS]), np.zeros(1))
    for part in parts:
        if part is None:
            return None
        room = np.union1d(total.room, part.room)
        room = room[room <= min(total.room[-1], part.room[-1])]
        total = _Stairs(room, total.at(room) + part.at(room))
    return total
