"""Plans by rule of thumb, in the planner's own terms: what it has to beat, and the points of the picture.

Chen et al. 2016 (arXiv:1604.06174) replay every block, or keep one in √n; frameworks let the user checkpoint every
k-th block; PyTorch's ``memory_budget`` and others keep what is dearest to replay for its bytes until these are used up.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, sqrt

from elbowroom.planning.profile import MADE, ProgramProfile, StepProfile
from elbowroom.planning.simulate import Choice

#: Of the bytes that autograd would hold, how much the greedy plans keep.
GREEDY_PERCENT = (25, 50, 75)

_PLAIN = Choice(plain=True)
_REPLAY = Choice(plain=False)


def baselines(step: StepProfile) -> dict[str, tuple[Choice, ...]]:
    """The plans by name: one choice for each region call of the step.

    ``"keep all"`` is the step without checkpointing, ``"replay all"`` checkpoints every call. ``"replay every 2nd"``
    and so on checkpoint one call in k, ``"keep every 3rd"`` and so on all but one in k, ``"sqrt(n) blocks"`` all but
    one in √n. ``"sqrt(n) values"`` keeps one in √m of the m values that a call makes, and ``"greedy 50%"`` keeps what
    costs most seconds per byte to make again, until half of the bytes that autograd would hold are used.
    """
    n_calls = len(step.calls)
    plans = {"keep all": (_PLAIN,) * n_calls, "replay all": (_REPLAY,) * n_calls}
    for k, nth in ((2, "2nd"), (3, "3rd"), (4, "4th")):
        if n_calls >= k:
            plans[f"replay every {nth}"] = every(k, n_calls, _REPLAY, _PLAIN)
            if k > 2:
                plans[f"keep every {nth}"] = every(k, n_calls, _PLAIN, _REPLAY)
    plans["sqrt(n) blocks"] = every(ceil(sqrt(n_calls)) if n_calls else 1, n_calls, _PLAIN, _REPLAY)
    plans["sqrt(n) values"] = _by_program(step, _one_in_sqrt)
    for percent in GREEDY_PERCENT:
        plans[f"greedy {percent}%"] = greedy(step, percent / 100)
    return plans


def every(k: int, n_calls: int, then: Choice, otherwise: Choice) -> tuple[Choice, ...]:
    """``then`` for one call in ``k``, the last of each k; ``otherwise`` for the rest."""
    return tuple(then if c % k == k - 1 else otherwise for c in range(n_calls))


def greedy(step: StepProfile, part: float) -> tuple[Choice, ...]:
    """Keep the saved values that take most seconds per byte to make again, until ``part`` of the bytes is used.

    A value's seconds are those of its operator alone, as in a knapsack that does not look at what leads to it. Calls of
    one program keep the same.
    """
    n_calls = [sum(call.program == p for call in step.calls) for p in range(len(step.programs))]
    offers = []
    total_bytes = 0
    for p, program in enumerate(step.programs):
        for v in sorted(program.saved):
            value = program.values[v]
            if value.kind == MADE:
                seconds_per_byte = program.operators[value.maker].seconds / max(1, value.nbytes)
                offers.append((-seconds_per_byte, p, v, n_calls[p] * value.nbytes))
                total_bytes += n_calls[p] * value.nbytes
    left_bytes = int(part * total_bytes)
    keeps: list[set[int]] = [set() for _ in step.programs]
    for _, p, v, nbytes in sorted(offers):
        if nbytes <= left_bytes:
            keeps[p].add(v)
            left_bytes -= nbytes
    choices = [Choice(plain=False, keep=frozenset(keep)) for keep in keeps]
    return tuple(choices[call.program] for call in step.calls)


def _by_program(step: StepProfile, choose: Callable[[ProgramProfile], Choice]) -> tuple[Choice, ...]:
    choices = [choose(program) for program in step.programs]
    return tuple(choices[call.program] for call in step.calls)


def _one_in_sqrt(program: ProgramProfile) -> Choice:
    made = [v for v, value in enumerate(program.values) if value.kind == MADE]
    k = max(1, ceil(sqrt(len(made))))
    return Choice(plain=False, keep=frozenset(made[k - 1 :: k]))
