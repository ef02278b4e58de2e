"""Policies: which values of a region are kept. They read as sentences: ``keep=matmuls``, ``keep=["qkv"]``.

A policy is a callable from a candidate value to bool; a list of operators, operator packets and labels; or the name of
a ready one. What is kept is never replayed; everything else is replayed when backward asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from elbowroom.errors import UsageError

_aten = torch.ops.aten


class Candidate(NamedTuple):
    """What a policy is asked about: a value just made. ``shape`` is of the tensor that the operator returned."""

    operator: torch._ops.OpOverload
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    label: str | None
    module: str
    line: str


Policy = Callable[[Candidate], bool]


def _packets(*names: str) -> frozenset[Any]:
    return frozenset(getattr(_aten, n) for n in names if hasattr(_aten, n))


_MATMULS = _packets(
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "addmv", "mv", "dot", "linear", "_addmm_activation"
)
_ATTENTION = _packets(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


def nothing(value: Candidate) -> bool:
    """Keep nothing: the least memory, every needed operator is replayed."""
    return False


def everything(value: Candidate) -> bool:
    """Keep everything: plain autograd, at plain autograd's cost (no recorder runs)."""
    return True


def matmuls(value: Candidate) -> bool:
    """Keep results of matrix products: the dearest to compute again per byte after attention."""
    return value.operator.overloadpacket in _MATMULS


def attention(value: Candidate) -> bool:
    """Keep results of fused attention kernels: their cost grows with the square of the sequence, their bytes do not."""
    return value.operator.overloadpacket in _ATTENTION


READY: dict[str, Policy] = {"nothing": nothing, "everything": everything, "matmuls": matmuls, "attention": attention}


def policy_of(keep: Any) -> Policy:
    """The policy that ``keep`` stands for.

    Raises UsageError for a string that is no ready policy, and for list items that are neither operators nor labels.
    """
    if keep is None:
        return nothing
    if isinstance(keep, str):
        if keep not in READY:
            raise UsageError(
                f"keep={keep!r} is no ready policy; there are {', '.join(sorted(READY))}. "
                f"For a label write keep=[{keep!r}]."
            )
        return READY[keep]
    if isinstance(keep, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _listed((keep,))
    if isinstance(keep, Iterable):
        return _listed(tuple(keep))
    if callable(keep):
        return keep  # type: ignore[no-any-return]
    raise UsageError(f"keep must be a policy, its name, or a list of operators and labels; got {type(keep).__name__}")


def _listed(items: tuple[Any, ...]) -> Policy:
    for item in items:
        is_function = isinstance(item, type) and issubclass(item, torch.autograd.Function)
        if not is_function and not isinstance(item, (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            raise UsageError(
                f"keep has {item!r}: its items are operators (torch.ops.aten.mm, torch.ops.aten.mm.default) or labels "
                f"given with elbowroom.name(tensor, label)"
            )
    chosen = frozenset(items)

    def listed(value: Candidate) -> bool:
        return value.operator in chosen or value.operator.overloadpacket in chosen or value.label in chosen

    listed.items = chosen  # type: ignore[attr-defined]
    return listed


def key_of(keep: Any) -> Any:
    """Equal for policies that decide alike, as far as can be seen: calls share programs only under equal keys."""
    policy = policy_of(keep)
    items = getattr(policy, "items", None)
    if items is not None:
        return items
    code = getattr(policy, "__code__", None)
    if code is None:
        return policy
    # A function written anew at each call is the same policy if its code and what it closes over are the same.
    cells = tuple(id(cell.cell_contents) for cell in policy.__closure__ or ())
    return (code, cells, policy.__defaults__)


def to_names(keep: Any) -> Any:
    """``keep`` in a form that pickles: operators in a list become their names."""
    if isinstance(keep, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        keep = [keep]
    if keep is None or isinstance(keep, str) or not isinstance(keep, Iterable):
        return keep
    operators = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    return [_Named(str(item)) if isinstance(item, operators) else item for item in keep]


def from_names(keep: Any) -> Any:
    """The inverse of ``to_names``."""
    if not isinstance(keep, list):
        return keep
    return [item.operator() if isinstance(item, _Named) else item for item in keep]


class _Named(NamedTuple):
    """An operator or packet by its name, such as ``aten.mm.default``."""

    name: str

    def operator(self) -> Any:
        found: Any = torch.ops
        for part in self.name.split("."):
            found = getattr(found, part)
        return found
