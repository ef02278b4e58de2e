"""The proof: replay each operator right after it ran, compare bits, and look for writes nobody declared (rule 9).

It runs while a program is new and at calls 2, 4, 8, ...: one example proves little (a write may happen to change
nothing the first time), so structure is watched as well: who takes the address of a storage makes it opaque (rule 8).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from elbowroom.core.geometry import geometry_of, over, whole_storage
from elbowroom.core.hermetic import Keys, hermetic
from elbowroom.core.operators import Facts
from elbowroom.core.program import tensors_of
from elbowroom.core.rng import States, drawing_from, standing_still

#: Namespaces whose operators have the tag if they draw.
_HONEST = frozenset({"aten", "prims"})

#: Below this, launching kernels takes longer than hashing.
_SMALL_BYTES = 1 << 14

_COLUMNS = 1024


def fingerprint(tensor: Tensor) -> int:
    """A fingerprint of the whole storage under ``tensor``, by its bytes; only good within this process.

    Of small ones on the CPU, a hash of the bytes. Else a hash of sums over rows and columns: three passes over memory,
    and no temporaries of its size. Sums of 64-bit words keep only the parity of their top bits, so signs are summed as
    floats, too; no sum widens its argument, since torch would copy it first.
    """
    storage = tensor.untyped_storage()
    n_bytes = storage.nbytes()
    on_cpu = tensor.device.type == "cpu"
    if n_bytes <= _SMALL_BYTES and on_cpu and not torch._C._is_cow_tensor(tensor):  # type: ignore[attr-defined]
        return hash(ctypes.string_at(storage.data_ptr(), n_bytes))
    n_rows = n_bytes // (4 * _COLUMNS)
    n_words = n_rows * _COLUMNS
    parts = []
    if n_rows:
        words = torch.empty(0, dtype=torch.int32, device=tensor.device).set_(storage, 0, (n_words,), (1,))
        wide = words.view(torch.int64).view(n_rows, _COLUMNS // 2)
        floats = words.view(torch.float32).view(n_rows, _COLUMNS)
        parts = [wide.sum(0), wide.sum(1), floats.sum(1)]
    # A copy: NumPy's view of a storage would forbid to resize it from then on.
    rest = whole_storage(storage, tensor)[4 * n_words :].clone()
    return hash(tuple(part.cpu().numpy().tobytes() for part in (*parts, rest)))


def _as_bits(tensor: Tensor) -> Tensor:
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point():
        return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    return tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal bit for bit, NaN equal to NaN; -0.0 is not 0.0."""
    if one.shape != other.shape or one.dtype != other.dtype or one.stride() != other.stride():
        return False
    if torch.equal(_as_bits(one), _as_bits(other)):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    a, b = (torch.view_as_real(t.resolve_conj().resolve_neg()) if t.is_complex() else t for t in (one, other))
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(_as_bits(a.masked_fill(nan, 0)), _as_bits(b.masked_fill(nan, 0)))


def provable(tensor: Tensor) -> bool:
    """Whether the tensor has bytes to compare: not on the meta device, not fake, not empty of storage."""
    return (
        tensor.device.type != "meta" and tensor.untyped_storage().nbytes() > 0 and type(tensor).__name__ != "FakeTensor"
    )


class Rerun:
    """One operator, about to run: what a second run of it needs, taken before the first: written storages above all."""

    def __init__(
        self,
        func: Any,
        facts: Facts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Iterable[Tensor],
        states: States,
        grad_mode: bool,
    ) -> None:
        self.func = func
        self.facts = facts
        self.states = states
        self.grad_mode = grad_mode
        self.scratch: dict[int, torch.UntypedStorage] = {}
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.scratch:
                self.scratch[storage._cdata] = storage.clone()
        self.args = _as_replayed(args, self.scratch)
        self.kwargs = _as_replayed(kwargs, self.scratch)

    def differing(self, out: Any, written: Iterable[Tensor], keys: Keys) -> tuple[set[int], set[int], str]:
        """Run again and compare: (numbers of flattened results, storages written) that differ, and why."""
        first = list(tensors_of(out))
        n_results = range(len(first))
        everything = {t.untyped_storage()._cdata for t in written}
        try:
            # A custom operator may draw without the tag that says so: its second run must not move the generators.
            with (
                hermetic(keys),
                nullcontext() if self.func.namespace in _HONEST else standing_still(self.args, self.kwargs),
                drawing_from(self.states, self.facts, self.kwargs) as kwargs,
            ):
                torch._C._set_grad_enabled(self.grad_mode)
                again = list(tensors_of(self.func(*self.args, **kwargs)))
        except torch.OutOfMemoryError:
            return set(n_results), everything, "no memory to prove it"
        except Exception as error:
            return set(n_results), everything, f"a second run raised {type(error).__name__}"
        if len(again) != len(first):
            return set(n_results), everything, "a second run gave another number of results"
        with hermetic(keys):
            bad = set()
            for i, (one, other) in enumerate(zip(first, again, strict=True)):
                if self.facts.empty or i in self.facts.scratch:
                    continue
                if _strided(one) and _strided(other) and provable(one) and not same_bits(one, other):
                    bad.add(i)
            bad_writes = set()
            for tensor in written:
                mine = self.scratch[tensor.untyped_storage()._cdata]
                if not torch.equal(whole_storage(mine, tensor), whole_storage(tensor.untyped_storage(), tensor)):
                    bad_writes.add(tensor.untyped_storage()._cdata)
        return bad, bad_writes, "a second run gave other bits"


def _strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def _as_replayed(tree: Any, scratch: dict[int, torch.UntypedStorage]) -> Any:
    """Arguments as a replay gives them: none asks for a gradient, those over a written storage are scratch copies."""
    if isinstance(tree, Tensor):
        if _strided(tree) and scratch and tree.untyped_storage()._cdata in scratch:
            return over(scratch[tree.untyped_storage()._cdata], geometry_of(tree), tree.device)
        return tree.detach() if tree.requires_grad else tree
    if isinstance(tree, list):
        return [_as_replayed(item, scratch) for item in tree]
    if type(tree) is tuple:
        return tuple(_as_replayed(item, scratch) for item in tree)
    if isinstance(tree, dict):
        return {name: _as_replayed(item, scratch) for name, item in tree.items()}
    return tree


_ADDRESS_TAKERS = frozenset(
    getattr(Tensor, name)
    for name in ("data_ptr", "numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "_typed_storage")
    if hasattr(Tensor, name)
)


class AddressWatch(TorchFunctionMode):
    """Sees who takes the address of a tensor's memory: Triton's launcher, numpy, dlpack, ctypes (rule 8)."""

    def __init__(self, touch: Callable[[Tensor, str], None]) -> None:
        super().__init__()
        self.touch = touch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ADDRESS_TAKERS and args and isinstance(args[0], Tensor):
            with torch._C.DisableTorchFunction():
                self.touch(args[0], f"its address was taken by {getattr(func, '__name__', func)}")
        return func(*args, **(kwargs or {}))


def in_generated_code() -> bool:
    """Whether an operator was called from code that a compiler generated, whose other kernels nobody sees (rule 8)."""
    frame = sys._getframe(1)
    while frame is not None:
        if "torchinductor_" in frame.f_code.co_filename or "inductor_cache" in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
