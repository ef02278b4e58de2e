"""The allocation as a linear program: one option for each call, every row of ``Peaks`` within the budget.

Variables: x (columns of ``Peaks``, 0 to 1), one level y for each row, one z for each shared storage, and a last one.

    minimise    Σ extra_s x                                    (or the peak itself: the last variable)
    so that     Σ x of a call = 1
                y_i = y_(i-1) + (bytes_i - bytes_(i-1)) x - (discount_i - discount_(i-1)) z
                y_i + constant_i ≤ budget                       (or the last variable)
                z ≤ Σ x of all holders but one, for each that is left out

Rows differ from their neighbours in a call or two, so a row by its difference is sparse: HiGHS is ten times as fast as
with the rows as they are. With whole x, z is the number of holders beyond the first, as ``Peaks.rows`` counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from elbowroom.planning.peaks import Floats, Ints, Peaks

OPTIMAL, STOPPED, INFEASIBLE = "optimal", "stopped", "infeasible"

#: Bytes are given to the solver in units of which the budget has so many: its tolerances are absolute.
_UNITS = 1e5


class Answer(NamedTuple):
    """``value``: extra seconds, or bytes of the peak. ``x``: of every column. Of a relaxation only, ``reduced``: by how
    much the value grows at least if the column is picked; ``prices``: by how much it falls per byte of budget, by row.
    Without an answer (``status``), all of them are None."""

    status: str
    value: float | None = None
    x: Floats | None = None
    reduced: Floats | None = None
    prices: Floats | None = None


class LinearProgram:
    """The program above over some of the columns. ``budget_bytes`` None: minimise the peak instead of the seconds."""

    def __init__(self, peaks: Peaks, budget_bytes: int | None, plain_s: float, columns: Ints | None = None) -> None:
        self.peaks = peaks
        self.columns = np.arange(len(peaks.extra_s)) if columns is None else columns
        self.n_x, self.n_y, self.n_z = len(self.columns), len(peaks.constant), len(peaks.shared)
        self.plain_s = plain_s
        scale = budget_bytes if budget_bytes is not None else int(peaks.nbytes.max(initial=1)) * len(peaks.options)
        self.byte = 1.0 if scale < 10 * _UNITS else _UNITS / scale  # whole bytes as they are, while they are small
        self.second = 1e3 / plain_s if plain_s > 0 else 1.0
        self.budget_bytes = budget_bytes
        self._bounds()
        self._rows()

    def _bounds(self) -> None:
        n = self.n_x + self.n_y + self.n_z + 1
        self.cost = np.zeros(n)
        self.lower, self.upper = np.zeros(n), np.full(n, np.inf)
        y = slice(self.n_x, self.n_x + self.n_y)
        self.lower[y] = -np.inf
        if self.n_z:
            self.upper[self.n_x + self.n_y : -1] = [len(s.members) - 1 for s in self.peaks.shared]
        if self.budget_bytes is None:
            self.cost[-1] = 1.0
        else:
            # The last variable is 1: gaps are relative to the step's whole time, not to what comes on top.
            self.cost[: self.n_x] = self.peaks.extra_s[self.columns] * self.second
            self.cost[-1] = self.plain_s * self.second
            self.lower[-1] = self.upper[-1] = 1.0
            self.upper[y] = (self.budget_bytes - self.peaks.constant) * self.byte

    def _rows(self) -> None:
        peaks, n_x, n_y, n_z = self.peaks, self.n_x, self.n_y, self.n_z
        n_calls = len(peaks.options)
        owner = np.repeat(np.arange(n_calls), np.diff(peaks.first))[self.columns]
        once = sparse.csr_matrix((np.ones(n_x), (owner, np.arange(n_x))), shape=(n_calls, n_x))
        steps = sparse.csr_matrix(-np.diff(peaks.nbytes[:, self.columns], axis=0, prepend=0) * self.byte)
        counted = sparse.csr_matrix(np.diff(peaks.discount, axis=0, prepend=0) * self.byte)
        levels = sparse.eye(n_y) - sparse.eye(n_y, k=-1)
        rest = sparse.csr_matrix((n_calls, n_y + n_z + 1))
        self.equal = sparse.vstack(
            [
                sparse.hstack([once, rest]),
                sparse.hstack([steps, levels, counted, sparse.csr_matrix((n_y, 1))]),
            ]
        ).tocsr()
        self.equal_to = np.concatenate([np.ones(n_calls), np.zeros(n_y)])
        less = []
        if self.budget_bytes is None:
            none_x, none_z = sparse.csr_matrix((n_y, n_x)), sparse.csr_matrix((n_y, n_z))
            less.append(sparse.hstack([none_x, sparse.eye(n_y), none_z, -np.ones((n_y, 1))]))
        shared = self._sharing()
        if shared.shape[0]:
            less.append(shared)
        self.less = sparse.vstack(less).tocsr() if less else None
        self.less_than = np.zeros(self.less.shape[0]) if self.less is not None else None
        if self.budget_bytes is None and self.less_than is not None:
            self.less_than[:n_y] = -peaks.constant * self.byte

    def _sharing(self) -> Any:
        """z ≤ Σ x of all holders but one."""
        place = np.full(len(self.peaks.extra_s), -1)
        place[self.columns] = np.arange(self.n_x)
        rows, columns, entries = [], [], []
        n = 0
        for g, shared in enumerate(self.peaks.shared):
            for left_out in range(len(shared.members)):
                others = np.concatenate([m for i, m in enumerate(shared.members) if i != left_out])
                found = place[others][place[others] >= 0]
                rows += [n] * (1 + len(found))
                columns += [self.n_x + self.n_y + g, *found.tolist()]
                entries += [1.0] + [-1.0] * len(found)
                n += 1
        return sparse.csr_matrix((entries, (rows, columns)), shape=(n, len(self.cost)))

    def relaxed(self, time_limit_s: float) -> Answer:
        """The best with parts of options; no whole answer is better."""
        result = linprog(
            self.cost, A_ub=self.less, b_ub=self.less_than, A_eq=self.equal, b_eq=self.equal_to,
            bounds=np.stack([self.lower, self.upper], axis=1), method="highs", options={"time_limit": time_limit_s},
        )  # fmt: skip
        if result.status != 0:
            return Answer(INFEASIBLE if result.status == 2 else STOPPED)
        reduced = np.maximum(result.lower.marginals[: self.n_x], 0.0) / self._unit
        of_y = result.upper.marginals[self.n_x : self.n_x + self.n_y]
        prices = np.maximum(-of_y, 0.0) * self.byte / self._unit
        return Answer(OPTIMAL, self._value(result.fun), self._spread(result.x), self._all(reduced), prices)

    def whole(self, time_limit_s: float, *, gap: float, node_limit: int | None = None) -> Answer:
        """The best with whole options, or what was found when the time (or the number of nodes) was used up."""
        options: dict[str, float] = {"time_limit": time_limit_s, "mip_rel_gap": gap}
        if node_limit is not None:
            options["node_limit"] = node_limit
        limits = [LinearConstraint(self.equal, self.equal_to, self.equal_to)]
        if self.less is not None:
            limits.append(LinearConstraint(self.less, -np.inf, self.less_than))
        kinds = np.zeros(len(self.cost))
        kinds[: self.n_x] = 1
        result = milp(
            self.cost, integrality=kinds, bounds=Bounds(self.lower, self.upper), constraints=limits, options=options
        )
        if result.x is None:
            return Answer(INFEASIBLE if result.status == 2 else STOPPED)
        return Answer(OPTIMAL if result.status == 0 else STOPPED, self._value(result.fun), self._spread(result.x))

    @property
    def _unit(self) -> float:
        return self.byte if self.budget_bytes is None else self.second

    def _value(self, cost: float) -> float:
        return cost / self.byte if self.budget_bytes is None else cost / self.second - self.plain_s

    def _spread(self, x: Floats) -> Floats:
        of_all = np.zeros(len(self.peaks.extra_s))
        of_all[self.columns] = x[: self.n_x]
        return of_all

    def _all(self, reduced: Floats) -> Floats:
        of_all: Floats = np.full(len(self.peaks.extra_s), np.inf)
        of_all[self.columns] = reduced
        return of_all
