"""Steps whose calls nest like brackets: who ran forward last runs backward first. For them the best plan is found.

What a call keeps is there in its own rows and in those of the calls inside it, and nothing of these is there in its
own. So all that a call has to know of those around it is one number: what they keep. That makes the least peak a
matter of bisection, and the cheapest plan one of dynamic programming over that number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elbowroom.planning.peaks import Floats, Ints, Peaks

#: Steps of the staircase ``_Stairs`` at most; beyond that they are made coarser, and the plan is not quite the best.
_MAX_STEPS = 6000


@dataclass(frozen=True)
class Nest:
    """``order``: the calls by their forwards. ``own[c]``: rows in which call ``c`` is the innermost. ``parent[c]``: the
    call around it, -1 if none is. ``whole``: whether the step nests, with no shared storage, so that all that is said
    above holds."""

    order: tuple[int, ...]
    own: tuple[Ints, ...]
    parent: tuple[int, ...]
    whole: bool


def nest_of(peaks: Peaks) -> Nest:
    """How the calls of a step nest."""
    present = np.maximum.reduceat(peaks.nbytes, peaks.first[:-1], axis=1) > 0
    begins = np.where(present.any(axis=0), present.argmax(axis=0), len(present))
    order = np.argsort(begins, kind="stable")
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order))
    by_rank = np.where(present, ranks, -1)
    innermost = by_rank.max(axis=1, initial=-1)
    own = tuple(np.flatnonzero(innermost == ranks[c]) for c in range(len(order)))
    whole = not peaks.shared
    parent, around = [-1] * len(order), [np.zeros(len(order), dtype=bool) for _ in order]
    for c in order.tolist():
        if not len(own[c]):
            continue
        others = present[own[c]].copy()
        others[:, c] = False
        around[c] = others[0]
        whole &= bool((others == around[c]).all())
        if around[c].any():
            parent[c] = int(order[by_rank[own[c][0]][around[c]].max()])
            outside = around[parent[c]].copy()
            outside[parent[c]] = True
            whole &= bool((outside == around[c]).all())
        inside = np.delete(peaks.nbytes[:, peaks.first[c] : peaks.first[c + 1]], own[c], axis=0)
        kept = _kept(peaks, c)
        whole &= bool(((inside == kept).all(axis=1) | (inside == 0).all(axis=1)).all())
    return Nest(tuple(order.tolist()), own, tuple(parent), whole)


# The least peak ------------------------------------------------------------------------------------------------------


def most_frugal(peaks: Peaks, nest: Nest) -> Ints:
    """The picks of the least peak; a guess at them if the step does not nest.

    At a given limit each call takes the option that keeps least among those whose own rows are within the limit:
    whatever the calls inside it do, nothing helps them more. The least limit is found by bisection.
    """
    picks = np.array([int(np.argmin(_kept(peaks, c))) for c in range(len(peaks.options))], dtype=np.int64)
    low, high = -1, peaks.peak_bytes(picks)  # below all, above the least
    while high - low > 1:
        middle = (low + high) // 2
        found = _within(peaks, nest, middle)
        if found is None:
            low = middle
        else:
            picks = found
            high = middle if peaks.shared else min(middle, peaks.peak_bytes(picks))
    return picks


def _within(peaks: Peaks, nest: Nest, limit_bytes: int) -> Ints | None:
    picks = np.zeros(len(nest.order), dtype=np.int64)
    level = peaks.constant.copy()
    for c in nest.order:
        a, b = peaks.first[c], peaks.first[c + 1]
        own = nest.own[c]
        fits = (level[own, None] + peaks.nbytes[own, a:b] <= limit_bytes).all(axis=0)
        if not fits.any():
            return None
        picks[c] = int(np.where(fits, peaks.kept_bytes[a:b], np.iinfo(np.int64).max).argmin())
        level += peaks.nbytes[:, a + picks[c]]
    return picks if (level <= limit_bytes).all() else None


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
    """Extra seconds of a call and those inside it are at least ``base_s + price * bytes that the calls around keep``."""

    base_s: float
    price: float


def cheapest(peaks: Peaks, nest: Nest, budget_bytes: int, prices: Floats, known_s: float) -> Ints | None:
    """The plan of least extra seconds within the budget, if that takes ``known_s`` or less; else another plan or None.

    ``nest`` must be whole. ``prices``: seconds per byte of each row, not negative, as the duals of the relaxation. Any
    prices give lower bounds (Lagrange); with the duals these are so near that few steps of each staircase can still
    belong to a plan that is better than ``known_s``, and the rest is dropped.
    """
    inside: list[list[int]] = [[] for _ in nest.order]
    for c, parent in enumerate(nest.parent):
        if parent >= 0:
            inside[parent].append(c)
    outermost = [c for c, parent in enumerate(nest.parent) if parent < 0]
    room = [budget_bytes - _own_peak(peaks, nest, c) for c in range(len(nest.order))]
    bounds: dict[int, _Bound] = {}
    for c in reversed(nest.order):
        bounds[c] = _bound(peaks, nest, c, budget_bytes, prices, [bounds[i] for i in inside[c]])
    above_s = known_s - sum(bounds[c].base_s for c in outermost)
    above_s += 1e-9 * abs(known_s) if np.isfinite(known_s) else 0.0
    stairs: dict[int, _Stairs] = {}
    within: dict[int, _Stairs] = {}
    for c in reversed(nest.order):
        within[c] = _together([stairs[i] for i in inside[c]])
        found = _climbed(peaks, c, room[c], within[c], bounds[c], above_s)
        if found is None:
            return None
        stairs[c] = found
    picks = np.zeros(len(nest.order), dtype=np.int64)
    around = np.zeros(len(nest.order), dtype=np.int64)
    for c in nest.order:
        if nest.parent[c] >= 0:
            around[c] = around[nest.parent[c]] + _kept(peaks, nest.parent[c])[picks[nest.parent[c]]]
        kept = _kept(peaks, c)
        total_s = _extra(peaks, c) + within[c].at(around[c] + kept)
        total_s[around[c] > room[c]] = np.inf
        picks[c] = np.lexsort((kept, total_s))[0]
    return picks


def _kept(peaks: Peaks, c: int) -> Ints:
    return peaks.kept_bytes[peaks.first[c] : peaks.first[c + 1]]


def _extra(peaks: Peaks, c: int) -> Floats:
    return peaks.extra_s[peaks.first[c] : peaks.first[c + 1]]


def _own_peak(peaks: Peaks, nest: Nest, c: int) -> Ints:
    """The highest of a call's own rows, for each option, without what the calls around it keep."""
    own = nest.own[c]
    columns = slice(peaks.first[c], peaks.first[c + 1])
    highest: Ints = (peaks.constant[own, None] + peaks.nbytes[own, columns]).max(axis=0, initial=0)
    return highest


def _bound(
    peaks: Peaks, nest: Nest, c: int, budget_bytes: int, prices: Floats, inside: list[_Bound]
) -> _Bound:
    own = nest.own[c]
    columns = slice(peaks.first[c], peaks.first[c + 1])
    price = sum(b.price for b in inside)
    paid = prices[own] @ (peaks.constant[own, None] + peaks.nbytes[own, columns] - budget_bytes)
    least_s = float((_extra(peaks, c) + paid + price * _kept(peaks, c)).min())
    return _Bound(least_s + sum(b.base_s for b in inside), price + float(prices[own].sum()))


def _together(parts: list[_Stairs]) -> _Stairs:
    """Of calls side by side within one: their seconds add up."""
    if not parts:
        return _Stairs(np.array([np.iinfo(np.int64).max // 2]), np.zeros(1))
    total = parts[0]
    for part in parts[1:]:
        room = np.union1d(total.room, part.room)
        room = room[room <= min(total.room[-1], part.room[-1])]
        total = _Stairs(room, total.at(room) + part.at(room))
    return total


def _climbed(
    peaks: Peaks, c: int, room: Ints, within: _Stairs, bound: _Bound, above_s: float
) -> _Stairs | None:
    """The staircase of a call from that of the calls inside it; None if no step is left."""
    rooms = np.minimum(within.room[None, :] - _kept(peaks, c)[:, None], room[:, None]).ravel()
    seconds = (within.seconds[None, :] + _extra(peaks, c)[:, None]).ravel()
    hopeful = (rooms >= 0) & (seconds - bound.base_s - bound.price * rooms <= above_s)
    rooms, seconds = rooms[hopeful], seconds[hopeful]
    if not len(rooms):
        return None
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
