"""An ``autograd.Function`` as one operator of the tape: re-run whole in a replay, proved like any other (rule 8).

Functions around raw kernels (Triton, CUDA extensions) write memory that PyTorch does not see; without this their
results are opaque and kept. It re-runs the function's forward, so it is the author who declares it fit for that.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from elbowroom.core.operators import Facts
from elbowroom.core.recorder import recorders

F = TypeVar("F", bound=type[Function])


class _Context:
    """What ``forward`` gets as ``ctx`` in a replay: it only collects what is saved."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Any) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass

    def mark_dirty(self, *tensors: Any) -> None:
        raise RuntimeError("a function that writes to its inputs (mark_dirty) cannot be replayed as one operator")


class FunctionCall:
    """The operator that stands for a function class: from forward's arguments to results and saved tensors."""

    namespace = "function"

    def __init__(self, function: type[Function]) -> None:
        self.function = function
        self.overloadpacket = function
        self.facts = Facts.of_function()

    def __call__(self, *args: Any, needs_input_grad: tuple[bool, ...]) -> list[Any]:
        context = _Context(needs_input_grad)
        if _has_setup_context(self.function):
            out = self.function.forward(*args)
            self.function.setup_context(context, args, out)
        else:
            out = self.function.forward(context, *args)
        results = list(out) if isinstance(out, tuple) else [out]
        return [*results, *(t for t in context.saved_tensors if isinstance(t, Tensor))]

    def __str__(self) -> str:
        return f"autograd.Function {self.function.__name__}"


def _has_setup_context(function: type[Function]) -> bool:
    return function.setup_context is not torch.autograd.function._SingleLevelFunction.setup_context


def replayable(function: F) -> F:
    """Declare that an ``autograd.Function`` may be replayed as one operator.

    Its forward then depends on its arguments and on torch's generators only, and writes to none of its arguments.

    Use it on functions around raw kernels; without it what they make is kept. Returns the class itself; it works as a
    decorator. The proof compares a second run bit for bit: a function that does not repeat is kept all the same.

    Raises TypeError if it is no subclass of ``torch.autograd.Function``.
    """
    if not (isinstance(function, type) and issubclass(function, Function)):
        raise TypeError(f"replayable() needs a subclass of torch.autograd.Function, got {function!r}")
    if "_elbowroom_call" in function.__dict__:
        return function
    call = FunctionCall(function)

    def recorded_apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        apply: Any = super(function, cls).apply  # type: ignore[arg-type]
        own = cls.__dict__.get("_elbowroom_call")
        watching = [r for r in recorders() if not r.stopped and r.paused is None] if torch.is_grad_enabled() else []
        if own is None or not watching or kwargs:  # a subclass is another function, to be declared by itself
            return apply(*args, **kwargs)
        needs = {"needs_input_grad": tuple(isinstance(a, Tensor) and a.requires_grad for a in args)}
        for recorder in watching:
            recorder.begin_function(own, args, needs)
        try:
            out = apply(*args)
        except BaseException:
            for recorder in watching:
                recorder.abort_function()
            raise
        for recorder in watching:
            recorder.end_function(out)
        return out

    function._elbowroom_call = call  # type: ignore[attr-defined]
    function.apply = classmethod(recorded_apply)  # type: ignore[method-assign, assignment]
    return function
