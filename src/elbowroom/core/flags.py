"""Process-wide switches that kernels read: a replay runs under the ones its forward ran under (engine rule 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_c = torch._C

# (getter, setter) of each switch that can change the bits of a result.
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (
        lambda: (_c._get_deterministic_algorithms(), _c._get_deterministic_algorithms_warn_only()),
        lambda state: _c._set_deterministic_algorithms(state[0], warn_only=state[1]),
    ),
    (_c._get_float32_matmul_precision, _c._set_float32_matmul_precision),
    (_c._get_mkldnn_enabled, _c._set_mkldnn_enabled),
    (_c._get_cudnn_enabled, _c._set_cudnn_enabled),
    (_c._get_cudnn_deterministic, _c._set_cudnn_deterministic),
    (_c._get_cudnn_benchmark, _c._set_cudnn_benchmark),
    (_c._get_cudnn_allow_tf32, _c._set_cudnn_allow_tf32),
)


class Flags(NamedTuple):
    """The switches as they stood when a region ran."""

    states: tuple[Any, ...]

    @classmethod
    def now(cls) -> Flags:
        return cls(tuple([get() for get, _ in _SWITCHES]))

    @classmethod
    def none(cls) -> Flags:
        return cls(())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set what differs, and put it back."""
        changed = []
        for state, (get, put) in zip(self.states, _SWITCHES, strict=False):
            found = get()
            if found != state:
                changed.append((put, found))
                put(state)
        try:
            yield
        finally:
            for put, found in changed:
                put(found)
