"""The implementations of activation checkpointing that the outside tests can be run against.

A contender has ``checkpoint(fn, *args, **kwargs)`` and ``wrap(module)``, and says of itself whether it saves memory
(``saves_memory``) and whether it runs the function again in backward (``recomputes``). ``plain`` is the control: it
checkpoints nothing, so every test that is not about memory must pass with it. ``torch`` shows that the tests can fail.

    pytest tests/conformance --contender=plain
    pytest tests/conformance --contender=checkpoint,keep-matmuls
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from torch import nn

Call = Callable[..., Any]


class Plain:
    """No checkpointing at all."""

    saves_memory = False
    recomputes = False

    def checkpoint(self, fn: Call, *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    def wrap(self, module: nn.Module) -> nn.Module:
        return module


class Torch:
    """torch.utils.checkpoint with use_reentrant=False; wrap() is torch's own CheckpointWrapper."""

    saves_memory = True
    recomputes = True

    def checkpoint(self, fn: Call, *args: Any, **kwargs: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(fn, *args, use_reentrant=False, **kwargs)

    def wrap(self, module: nn.Module) -> nn.Module:
        from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrapper

        return torch_wrapper.checkpoint_wrapper(module, checkpoint_impl=torch_wrapper.CheckpointImpl.NO_REENTRANT)


class Elbowroom:
    """elbowroom.checkpoint and elbowroom.wrap with one fixed policy and one fixed amount of proof."""

    recomputes = False
    takes_torch_options = True

    def __init__(self, *, keep: Any = None, verify: str = "first", saves_memory: bool = True) -> None:
        import elbowroom

        self.library = elbowroom
        self.keep = keep
        self.verify = verify
        self.saves_memory = saves_memory

    def checkpoint(self, fn: Call, *args: Any, **kwargs: Any) -> Any:
        return self.library.checkpoint(fn, *args, keep=self.keep, verify=self.verify, **kwargs)

    def wrap(self, module: nn.Module) -> nn.Module:
        return self.library.wrap(module, keep=self.keep, verify=self.verify)


class _Holder(nn.Module):
    """A module around a plain callable, so that wrap() can be asked to run it."""

    def __init__(self, fn: Call) -> None:
        super().__init__()
        self.__dict__["fn"] = fn  # not a submodule: the callable's own module keeps its place in its own tree

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


class ElbowroomWrap(Elbowroom):
    """Every call goes through elbowroom.wrap: of the module itself, or of a small module around the callable."""

    takes_torch_options = False

    def checkpoint(self, fn: Call, *args: Any, **kwargs: Any) -> Any:
        if isinstance(fn, nn.Module):
            try:
                return self.wrap(fn)(*args, **kwargs)
            finally:
                self.library.unwrap(fn)
        if not callable(fn):  # wrap() takes modules only; what cannot be called is for checkpoint() to refuse
            return super().checkpoint(fn, *args, **kwargs)
        return self.wrap(_Holder(fn))(*args, **kwargs)


CONTENDERS: dict[str, Callable[[], Any]] = {
    "plain": Plain,
    "torch": Torch,
    "checkpoint": Elbowroom,
    "wrap": ElbowroomWrap,
    "keep-nothing": lambda: Elbowroom(keep="nothing"),
    "keep-everything": lambda: Elbowroom(keep="everything", saves_memory=False),
    "keep-matmuls": lambda: Elbowroom(keep="matmuls"),
    "keep-attention": lambda: Elbowroom(keep="attention"),
    "keep-half": lambda: Elbowroom(keep=EverySecond(), saves_memory=False),
    "verify-always": lambda: Elbowroom(verify="always"),
    "verify-never": lambda: Elbowroom(verify="never"),
}


class EverySecond:
    """A policy that says yes and no in turn: kept values next to replayed ones, whatever the operators are."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, _value: Any) -> bool:
        self.asked += 1
        return self.asked % 2 == 0


def contender(name: str) -> Any:
    """The contender called ``name``, or a Python file that defines ``checkpoint`` and ``wrap`` itself."""
    if name.endswith(".py"):
        spec = importlib.util.spec_from_file_location("contender_file", name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    if name not in CONTENDERS:
        raise KeyError(f"no contender {name!r}: one of {', '.join(CONTENDERS)}, or a file")
    return CONTENDERS[name]()
