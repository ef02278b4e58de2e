"""Nothing of the surroundings reaches a replay: modes, transforms, autocast and autograd are off (engine rule 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._python_dispatch import _disable_current_modes

#: Excluded inside dispatch-mode handlers by torch; without them some operators compute other bits.
LAZY_BITS = (
    DispatchKeySet(DispatchKey.Conjugate)
    | DispatchKeySet(DispatchKey.Negative)
    | DispatchKeySet(DispatchKey.ZeroTensor)
)

#: Thread-local dispatch keys (included, excluded) under which an operator was recorded.
Keys = tuple[DispatchKeySet, DispatchKeySet]


class hermetic:  # noqa: N801, it reads as a statement
    """Nothing of the surroundings reaches a replay: modes, transforms, autocast, autograd are off (rule 2)."""

    __slots__ = ("_grad_mode", "_guards", "fake", "keys")

    def __init__(self, keys: Keys, fake: Any = None) -> None:
        self.keys = keys
        self.fake = fake

    def __enter__(self) -> None:
        guards: list[Any] = [torch._C.DisableTorchFunction()]
        if torch._C._len_torch_dispatch_stack():
            guards.append(_disable_current_modes())
        if torch._C._functorch.peek_interpreter_stack() is not None:
            guards.append(torch._C._DisableFuncTorch())
        guards.append(torch._C._ForceDispatchKeyGuard(*self.keys))
        if self.fake is not None:
            guards.append(self.fake)
        for guard in guards:
            guard.__enter__()
        self._guards = guards
        self._grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # inside the guards: torch-function modes see this call, too

    def __exit__(self, *exception: Any) -> None:
        torch._C._set_grad_enabled(self._grad_mode)
        while self._guards:
            self._guards.pop().__exit__(*exception)


def undisturbed() -> bool:
    """Whether a view can be made as it is: no mode, no transform, no graph would see it."""
    return not (
        torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
