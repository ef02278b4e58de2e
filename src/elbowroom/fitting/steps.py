"""Where one training step ends and the next begins, seen from the forward of the model alone; and what kind it is.

A *step* here is what happens from a forward of the model to the next forward after a backward is over: one or more
forwards, their backward, and whatever follows (the optimizer). With gradient accumulation each micro-batch is one.
Steps are of the same *kind* if the model was called with the same shapes, in the same modes, as often before backward,
and gradients were there at the beginning or not: then they take the same bytes.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from elbowroom.planning.profile import digest_of


class Kind(NamedTuple):
    """Calls of the model with these signatures before backward; ``gradients``: some existed when the step began."""

    calls: tuple[str, ...]
    gradients: bool

    def begins_like(self, calls: tuple[str, ...], gradients: bool) -> bool:
        return self.gradients == gradients and self.calls[: len(calls)] == calls


class _Graph:
    """Lives as long as the graph of one forward of the model."""

    __slots__ = ("__weakref__",)


class _Backward:
    """Queued as a callback of one backward pass. It dies with the pass, even if that fails, and only then: when the
    thread's state is the caller's again, which a callback sees a copy of.
    """

    __slots__ = ("_step",)

    def __init__(self, step: Step) -> None:
        self._step = step

    def __call__(self) -> None:
        self._step.backward_over()

    def __del__(self) -> None:
        if self._step.when_backward_is_gone is not None:
            self._step.when_backward_is_gone()


class Step:
    """One step while it lasts."""

    def __init__(self, gradients: bool) -> None:
        self.gradients = gradients
        self.calls: tuple[str, ...] = ()
        self.n_regions_called = 0
        self.in_forward = False
        self.n_backwards_begun = 0
        self.n_backwards_done = 0
        self.is_mixed = False  # its region calls ran under more than one plan
        self.begin_s = time.perf_counter()
        self.end_s: float | None = None  # of the backward that ended last
        self.when_backward_ends: Callable[[], None] | None = None
        self.when_backward_is_gone: Callable[[], None] | None = None  # after it ended, or failed
        self._graphs: list[weakref.ref[_Graph]] = []
        self._task = -1

    @property
    def kind(self) -> Kind:
        return Kind(self.calls, self.gradients)

    @property
    def is_over(self) -> bool:
        """Whether a forward that comes now belongs to the next step."""
        if self.n_backwards_begun:
            return True
        return not any(graph() is not None for graph in self._graphs)

    @property
    def is_whole(self) -> bool:
        """Whether a backward ran, to its end, and nothing failed."""
        return 0 < self.n_backwards_done == self.n_backwards_begun

    @property
    def has_failed(self) -> bool:
        """Whether a backward raised. Torch may hold what that left behind until the next backward."""
        return self.n_backwards_done < self.n_backwards_begun

    def watch_graph(self, out: Any) -> None:
        """Have the graph of a forward tell when backward comes to it."""
        graph = _Graph()
        nodes = {t.grad_fn for t in _tensors_in(out) if t.grad_fn is not None}

        def comes(_: Any, alive: _Graph = graph) -> None:
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._task = task
                self.n_backwards_begun += 1
                torch.autograd.Variable._execution_engine.queue_callback(_Backward(self))

        for node in nodes:
            node.register_prehook(comes)
        if nodes:
            self._graphs.append(weakref.ref(graph))

    def backward_over(self) -> None:
        self.n_backwards_done += 1
        self.end_s = time.perf_counter()
        if self.when_backward_ends is not None:
            self.when_backward_ends()


def signature_of(model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Equal for calls of the model that do the same work: shapes, dtypes, flags of the arguments, and modes."""
    parts: list[Any] = [model.training, torch.get_default_dtype()]
    parts.append(bytes(p.requires_grad for p in model.parameters()))
    accelerator = torch.accelerator.current_accelerator()
    for device in ["cpu"] if accelerator is None else ["cpu", accelerator.type]:
        if torch.is_autocast_enabled(device):
            parts.append((device, torch.get_autocast_dtype(device)))
    _describe((args, kwargs), parts)
    return digest_of(tuple(map(str, parts)))


def model_digest(model: Module, regions: dict[str, Module]) -> str:
    """Equal for models with the same parameters, buffers and regions, whatever is in them."""
    tensors = [
        (name, str(tuple(t.shape)), str(t.dtype), t.requires_grad)
        for name, t in [*model.named_parameters(), *model.named_buffers()]
    ]
    return digest_of((tensors, [(name, type(module).__qualname__) for name, module in regions.items()]))


def has_gradients(model: Module) -> bool:
    return any(p.grad is not None for p in model.parameters())


def _describe(tree: Any, parts: list[Any]) -> None:
    if isinstance(tree, Tensor):
        parts.append((tuple(tree.shape), tree.dtype, tree.device, tree.requires_grad))
    elif isinstance(tree, dict):
        for key, item in tree.items():
            parts.append(key)
            _describe(item, parts)
    elif isinstance(tree, (list, tuple)):
        parts.append(len(tree))
        for item in tree:
            _describe(item, parts)
    elif tree is None or isinstance(tree, (bool, str)):
        parts.append(tree)
    else:
        parts.append(type(tree).__name__)  # numbers may differ from step to step: what they do shows in the operators


def _tensors_in(tree: Any, depth: int = 4) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif depth:
        if isinstance(tree, dict):
            items: Any = tree.values()
        elif isinstance(tree, (list, tuple)):
            items = tree
        else:
            items = getattr(tree, "__dict__", {}).values()  # a dataclass, or whatever else a model returns
        for item in items:
            yield from _tensors_in(item, depth - 1)
