"""From parts of options to whole ones, in whole bytes: round, repair what is above the budget, use what is left."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np

from elbowroom.planning.linear import Answer
from elbowroom.planning.peaks import Floats, Ints, Peaks

#: Seconds and parts of options below this are solver noise.
_NOISE = 1e-9


def rounded(peaks: Peaks, budget_bytes: int, answer: Answer, deadline_s: float) -> Ints | None:
    """Whole options near an answer of the linear program, every row within the budget; None if that fails.

    First only options that the answer holds for nearly as good (by ``answer.reduced``) may replace others.
    """
    assert answer.reduced is not None
    picks = largest_parts(peaks, answer)
    order = np.argsort(answer.reduced, kind="stable")
    n_calls = len(peaks.options)
    for n_columns, n_moves in ((4 * n_calls, 2 * n_calls), (len(order), n_calls // 4 + 8)):
        found = _repaired(peaks, budget_bytes, picks, order[:n_columns], n_moves, deadline_s)
        if found is not None:
            return found
    return None


def largest_parts(peaks: Peaks, answer: Answer) -> Ints:
    """The option of the largest part for each call; for whole answers the answer."""
    assert answer.x is not None
    bounds = pairwise(peaks.first.tolist())
    return np.array([np.argmax(answer.x[a:b]) for a, b in bounds], dtype=np.int64)


def _repaired(
    peaks: Peaks, budget_bytes: int, picks: Ints, columns: Ints, n_moves: int, deadline_s: float
) -> Ints | None:
    """Replace options by some of ``columns``, one by one, those that save most bytes above the budget per second."""
    picks = picks.copy()
    owner = owners(peaks)[columns]
    nbytes, extra_s = peaks.nbytes[:, columns], peaks.extra_s[columns]
    for _ in range(n_moves + 1):
        rows = peaks.rows(picks) - budget_bytes
        above = int(np.maximum(rows, 0).sum())
        if not above:
            return picks
        if time.monotonic() > deadline_s:
            return None
        now = peaks.columns(picks)[owner]
        after = np.maximum(rows[:, None] + nbytes - peaks.nbytes[:, now], 0).sum(axis=0)
        saves = np.flatnonzero(after < above)
        if not len(saves):
            return None
        cost_s: Floats = extra_s[saves] - peaks.extra_s[now[saves]]
        best = saves[np.argmin(cost_s / (above - after[saves]))]
        picks[owner[best]] = columns[best] - peaks.first[owner[best]]
    return None


def improved(peaks: Peaks, budget_bytes: int, picks: Ints, deadline_s: float) -> Ints:
    """Replace options by faster ones (or equally fast ones that keep less) for as long as the rows allow it."""
    picks = picks.copy()
    owner = owners(peaks)
    refused = np.zeros(len(owner), dtype=bool)
    while time.monotonic() <= deadline_s:
        columns = peaks.columns(picks)
        gain_s = peaks.extra_s[columns][owner] - peaks.extra_s
        smaller = peaks.kept_bytes < peaks.kept_bytes[columns][owner]
        noise = _NOISE * max(float(peaks.extra_s.max(initial=0.0)), 1e-30)
        wanted = np.flatnonzero((gain_s > noise) | (gain_s >= 0) & smaller)
        wanted = wanted[~refused[wanted]]
        slack = budget_bytes - peaks.rows(picks)
        grows = peaks.nbytes[:, wanted] - peaks.nbytes[:, columns[owner[wanted]]]
        wanted_now = np.flatnonzero((grows <= slack[:, None]).all(axis=0))
        if not len(wanted_now):
            break
        done: set[int] = set()
        for i in wanted_now[np.argsort(-gain_s[wanted[wanted_now]], kind="stable")]:
            column = int(wanted[i])
            call = int(owner[column])
            if call in done or (grows[:, i] > slack).any():
                continue
            before = picks[call]
            picks[call] = column - peaks.first[call]
            if peaks.shared and peaks.peak_bytes(picks) > budget_bytes:  # it held what others no longer had to
                picks[call] = before
                refused[column] = True
                continue
            done.add(call)
            slack = slack - grows[:, i]
        if not done:
            break
    return picks


def owners(peaks: Peaks) -> Ints:
    """The call of each column."""
    return np.repeat(np.arange(len(peaks.options)), np.diff(peaks.first))
