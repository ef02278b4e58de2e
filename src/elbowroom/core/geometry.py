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
    """Where the elements of a tensor lie in its storage. ``offset`` and ``stride`` are in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool
    neg: bool

    @property
    def extent_bytes(self) -> int:
        """Bytes of storage, from its start, that the view reaches."""
        if 0 in self.size:
            return 0
        last = self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.size)}"


def geometry_of(tensor: Tensor) -> Geometry:
    return Geometry(
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


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
    storage = base.untyped_storage()
    offset = wanted.offset
    if recorded.dtype == wanted.dtype:
        offset += base.storage_offset() - recorded.offset
    moved = wanted if offset == wanted.offset else wanted._replace(offset=offset)
    if storage.nbytes() < moved.extent_bytes:
        raise ChangedTensorError(
            f"a tensor {wanted}",
            cause=f"its storage was freed or shrunk: the view needs {moved.extent_bytes} bytes, {storage.nbytes()} are there",
            remedy="Keep the storage until backward is done.",
        )
    if wanted == recorded:
        return base
    if base.dtype != wanted.dtype or recorded.conj or recorded.neg:
        plain = torch.empty(0, dtype=wanted.dtype, device=base.device).set_(
            storage, offset, wanted.size, wanted.stride
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
