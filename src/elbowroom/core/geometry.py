"""A view is geometry over a value: size, stride, offset, dtype, conjugate and negative bits (engine rule 2).

Values are whole storages, so view operators are neither recorded nor replayed: whoever reads a view carries
its geometry, and the view is rebuilt over the replayed storage.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from elbowroom.errors import ChangedTensorError


class Geometry(NamedTuple):
    """Where the elements of a tensor lie in its storage. ``offset`` and ``stride`` are in elements.

    ``extent_bytes`` is how many bytes of the storage, from its start, the view reaches.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool
    neg: bool
    extent_bytes: int

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.size)}"

    def fits(self, tensor: Tensor) -> bool:
        """Whether this is the geometry of ``tensor``."""
        return (
            self.size == tensor.size()
            and self.stride == tensor.stride()
            and self.offset == tensor.storage_offset()
            and self.dtype is tensor.dtype
            and self.conj == tensor.is_conj()
            and self.neg == tensor.is_neg()
        )


def geometry_of(tensor: Tensor, known: Geometry | None = None) -> Geometry:
    """The geometry of a tensor; the very object ``known`` if that is it, so that ``is`` tells them equal."""
    if known is not None and known.fits(tensor):
        return known
    size, stride, offset, dtype = tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype
    offset = int(offset)
    extent = 0 if 0 in size else offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return Geometry(size, stride, offset, dtype, tensor.is_conj(), tensor.is_neg(), extent * dtype.itemsize)


def has_strided_storage(tensor: Tensor) -> bool:
    """False for sparse, mkldnn, quantized, nested and zero tensors: those are values by identity."""
    return (
        tensor.layout is torch.strided
        and torch._C._has_storage(tensor)
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor._is_zerotensor()
    )


def view(base: Tensor, recorded: Geometry | None, wanted: Geometry | None) -> Tensor:
    """The view ``wanted`` of the storage under ``base``.

    ``recorded`` is the geometry that ``base`` had when the value was recorded: the wanted offset is taken relative to
    it, so that a parameter which an outer engine gathered again at another place is still read right (rule 11).
    ``None`` stands for a tensor without strided storage: it is its own only view.

    Raises ChangedTensorError when the storage is smaller than the view (somebody freed or shrank it, rule 7).
    """
    if wanted is None or recorded is None:
        return base
    moved = base.storage_offset() - recorded.offset if recorded.dtype is wanted.dtype else 0
    has = base.untyped_storage().nbytes()
    if has < wanted.extent_bytes + moved * wanted.dtype.itemsize:
        raise ChangedTensorError(
            f"a tensor {wanted}",
            cause=f"its storage was freed or shrunk: the view needs {wanted.extent_bytes} bytes, {has} are there",
            remedy="Keep the storage until backward is done.",
        )
    if wanted is recorded:
        return base
    offset = wanted.offset + moved
    if base.dtype != wanted.dtype or recorded.conj or recorded.neg:
        plain = torch.empty(0, dtype=wanted.dtype, device=base.device).set_(
            base.untyped_storage(), offset, wanted.size, wanted.stride
        )
    else:
        plain = base.as_strided(wanted.size, wanted.stride, offset)
    if wanted.conj:
        plain = torch._conj(plain)
    if wanted.neg:
        plain = torch._neg_view(plain)
    return plain


def whole_storage(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """The storage as a flat uint8 tensor: for copies, comparisons and fingerprints."""
    return torch.empty(0, dtype=torch.uint8, device=like.device).set_(storage)


def over(storage: torch.UntypedStorage, geometry: Geometry, device: torch.device) -> Tensor:
    """The view ``geometry`` of a storage nobody has a tensor over."""
    plain = torch.empty(0, dtype=geometry.dtype, device=device).set_(
        storage, geometry.offset, geometry.size, geometry.stride
    )
    if geometry.conj:
        plain = torch._conj(plain)
    if geometry.neg:
        plain = torch._neg_view(plain)
    return plain
