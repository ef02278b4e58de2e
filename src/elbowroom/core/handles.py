"""What autograd gets in place of a saved tensor, and what it gets back for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from elbowroom.core.replayer import Handle, describe
from elbowroom.errors import ChangedTensorError

_NOTHING = contextlib.nullcontext()


def quiet() -> Any:
    """No torch-function mode sees what the recorder asks of tensors; costs nothing where there is none."""
    return torch._C.DisableTorchFunction() if torch._C._len_torch_function_stack() else _NOTHING


def _is_content(part: Any) -> bool:
    return isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex())


class Flattened:
    """A saved wrapper-subclass tensor as its plain parts (rule 11)."""

    __slots__ = ("context", "kind", "parts", "size", "stride")

    def __init__(self, tensor: Any, pack: Callable[[Tensor], Any]) -> None:
        names, self.context = tensor.__tensor_flatten__()
        self.kind = type(tensor)
        self.size = tensor.size()
        self.stride = tensor.stride()
        parts = {name: getattr(tensor, name) for name in names}
        # Whole-number parts say what shape it is (offsets of a jagged tensor), and by being the very same object.
        self.parts = {n: (True, pack(p)) if _is_content(p) else (False, p) for n, p in parts.items()}

    def rebuilt(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        inner = {n: unpack(p) if packed else p for n, (packed, p) in self.parts.items()}
        return self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)  # type: ignore[no-any-return]


def _fetch(handle: Handle) -> Tensor:
    with torch._C.DisableTorchFunction():
        return handle.tape.fetch(handle.index)


_outside_dynamo: Any = _fetch


def mind_dynamo() -> None:
    """Once Dynamo is loaded, tell it that a replay is none of its business."""
    global _outside_dynamo
    if _outside_dynamo is _fetch:
        _outside_dynamo = torch._dynamo.disable(_fetch)


def unpack(packed: Any) -> Tensor:
    """What autograd gets for what ``Recorder.pack`` gave it."""
    kind = type(packed)
    if kind is Handle:
        if torch.compiler.is_compiling():  # a compiled backward: Dynamo must not look into a replay
            return _outside_dynamo(packed)  # type: ignore[no-any-return]
        if torch._C._len_torch_function_stack():
            return _fetch(packed)
        return packed.tape.fetch(packed.index)  # type: ignore[no-any-return]
    if kind is tuple:  # a source that autograd holds itself, and the version it had
        tensor, version, program, value = packed
        if tensor._version == version and tensor.untyped_storage().nbytes():
            return tensor  # type: ignore[no-any-return]
        freed = tensor.numel() and not tensor.untyped_storage().nbytes()
        if freed or tensor._version != version:
            raise ChangedTensorError(
                describe(program.values[value]),
                recorded_version=version,
                found_version=tensor._version,
                cause="its storage was freed" if freed else None,
                remedy="Plain autograd refuses it, too: change it after backward, or give the region a copy of it.",
            )
        return tensor  # type: ignore[no-any-return]
    if kind is Flattened:
        return packed.rebuilt(unpack)  # type: ignore[no-any-return]
    return packed  # type: ignore[no-any-return]
