"""What a replay must know about an operator, read from its schema once: what it writes, views, draws, communicates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tag

_aten = torch.ops.aten

#: Namespaces whose operators talk to other processes: never replayed, never proved (rules 8 and 11).
COMMUNICATION = frozenset(
    {"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "fsdp", "symm_mem"}
)

#: Outputs that are working memory of the kernel, parts of which it never writes: exempt from the proof (rule 9).
SCRATCH_OUTPUTS: dict[Any, frozenset[int]] = {
    _aten.mkldnn_rnn_layer: frozenset({3}),
    _aten._cudnn_rnn: frozenset({3}),
    _aten._ctc_loss: frozenset({1}),
    _aten._embedding_bag: frozenset({1, 2, 3}),
    _aten._embedding_bag_forward_only: frozenset({1, 2, 3}),
}

#: Allocations without content. Read before a recorded fill, somebody else wrote them (rule 8).
EMPTY = frozenset(
    getattr(_aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
)

#: Operators whose written argument keeps nothing of its old content where the argument covers the storage.
_OVERWRITERS = frozenset(
    getattr(_aten, name)
    for name in (
        "copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_", "random_", "exponential_", "cauchy_",
        "geometric_", "log_normal_",
    )
)  # fmt: skip

#: They write to arguments without saying so in their schema: (positions, position of the flag that switches it on).
_LIARS: dict[Any, tuple[tuple[int, ...], int]] = {
    getattr(_aten, name): ((3, 4), 5)  # running_mean, running_var; training
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
}

#: They change what storage or how much of it a tensor has: not versions of a value but another one.
_RESIZERS = frozenset({_aten.resize_, _aten.resize_as_, _aten.resize_as_sparse_})

#: They return an alias although the schema does not say so.
_HIDDEN_VIEWS = frozenset({_aten._unsafe_view, _aten.set_, _aten._reshape_alias})

#: Real in, real out, no complex arithmetic inside: they need no Conjugate/Negative/ZeroTensor keys (rule 2).
_SIMPLE = frozenset(
    getattr(_aten, name)
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "native_layer_norm", "native_batch_norm", "native_group_norm",
        "_softmax", "_log_softmax", "embedding", "native_dropout", "cat", "clone", "sum", "mean",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_fused_rms_norm", "_to_copy",
    )
    if hasattr(_aten, name)
)  # fmt: skip


class Facts:
    """Facts of one operator overload. ``writes`` are (position or None, name, write_only) of written arguments."""

    __slots__ = (
        "communicates",
        "dynamic",
        "empty",
        "is_view",
        "lies",
        "private_generator",
        "resizes",
        "scratch",
        "seeded",
        "simple",
        "unrecorded",
        "writes",
    )

    def __init__(self, func: torch._ops.OpOverload) -> None:
        schema = func._schema
        packet = func.overloadpacket
        tags = func.tags
        self.resizes = packet in _RESIZERS
        self.communicates = func.namespace in COMMUNICATION
        written = [(i, a) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        metadata_only = Tag.inplace_view in tags and not self.resizes
        # Metadata-only writes make no version (rule 6).
        self.writes: tuple[tuple[int | None, str, bool], ...] = (
            ()
            if metadata_only
            else tuple((None if a.kwarg_only else i, a.name, a.is_out or packet in _OVERWRITERS) for i, a in written)
        )
        returns_alias = bool(schema.returns) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        self.is_view = (
            metadata_only
            or (packet in _HIDDEN_VIEWS and not any(a.is_out for _, a in written))
            or (returns_alias and not written)
        )
        self.lies = _LIARS.get(packet)
        self.unrecorded = self.is_view or self.communicates or self.resizes
        self.dynamic = Tag.dynamic_output_shape in tags or Tag.data_dependent_output in tags
        self.seeded = Tag.nondeterministic_seeded in tags
        self.private_generator = any(a.name == "generator" for a in schema.arguments)
        self.scratch = SCRATCH_OUTPUTS.get(packet, frozenset())
        self.empty = packet in EMPTY
        self.simple = Tag.pointwise in tags or packet in _SIMPLE or self.is_view

    @classmethod
    def of_function(cls) -> Facts:
        """The facts of an ``autograd.Function`` declared replayable: it draws perhaps, and writes nothing."""
        facts = cls.__new__(cls)
        facts.unrecorded = facts.resizes = facts.communicates = facts.is_view = facts.empty = facts.simple = (
            facts.private_generator
        ) = False
        facts.lies = None
        facts.seeded = facts.dynamic = True
        facts.writes = ()
        facts.scratch = frozenset()
        return facts


#: By ``id``: operators live as long as the process, and hashing one runs Python.
_facts: dict[int, Facts] = {}


def facts_of(func: torch._ops.OpOverload) -> Facts:
    facts = _facts.get(id(func))
    if facts is None:
        facts = _facts[id(func)] = Facts(func)
    return facts


def written_arguments(facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, bool]]:
    """The written arguments of a call as (argument, write_only); an argument may be a list of tensors."""
    found = []
    for position, name, write_only in facts.writes:
        value = args[position] if position is not None and position < len(args) else kwargs.get(name)
        if value is not None:
            found.append((value, write_only))
    if facts.lies is not None and args[facts.lies[1]]:
        found += [(args[i], False) for i in facts.lies[0] if args[i] is not None]
    return found
