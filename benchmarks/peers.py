"""Torch's own activation checkpointing, as its users apply it: what a plan is compared with.

Each contender takes a work and changes the forward of its blocks; parameters and results stay as they are. All of them
run the forward of a block again in backward, Python and buffers included: BatchNorm updates its statistics twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import works
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten
ATTENTION = (aten._scaled_dot_product_flash_attention_for_cpu.default,)
# The list of torchtitan's selective mode: what is expensive to compute, attention included.
PRODUCTS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._grouped_mm.default,
    aten.convolution.default,
    *ATTENTION,
)

Peer = Callable[[works.Work], None]


def every_block(work: works.Work) -> None:
    """Checkpoint around each block."""
    _checkpoint_each(work.blocks)


def every_second_block(work: works.Work) -> None:
    """Checkpoint around the first, third, fifth ... block."""
    _checkpoint_each(work.blocks[::2])


def segments(work: works.Work) -> None:
    """``checkpoint_sequential`` in ceil(sqrt(n)) segments (Chen et al. 2016): the last one, also the rest, runs plain.

    The blocks stay where they are, because models of others pass them more than one argument: the first block of a
    segment runs it all, the others hand on what they get.
    """
    blocks = work.blocks
    n_segments = math.ceil(math.sqrt(len(blocks)))
    length = len(blocks) // n_segments
    for start in range(0, (n_segments - 1) * length, length):
        first, *others = segment = blocks[start : start + length]
        whole = functools.partial(_run_in_turn, [block.forward for block in segment])
        first.forward = functools.partial(checkpoint, whole, use_reentrant=False)
        for other in others:
            other.forward = _hand_on


def selective(work: works.Work, operators: Sequence[Any]) -> None:
    """Checkpoint around each block that keeps the results of ``operators``."""
    options = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keeping(operators))}
    _checkpoint_each(work.blocks, options)


def contenders(work_name: str) -> dict[str, Peer]:
    """The peers for a work, by the names they have in the tables."""
    named: dict[str, Peer] = {
        "torch every block": every_block,
        "torch every second block": every_second_block,
        "torch sqrt(n) segments": segments,
    }
    if work_name.startswith("conv"):
        return named | {"selective matmuls, convs": lambda work: selective(work, PRODUCTS)}
    return named | {
        "selective matmuls, attention": lambda work: selective(work, PRODUCTS),
        "selective attention": lambda work: selective(work, ATTENTION),
    }


def _checkpoint_each(blocks: Sequence[nn.Module], options: dict[str, Any] | None = None) -> None:
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **(options or {}))


def _run_in_turn(forwards: Sequence[Callable[..., Tensor]], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    for forward in forwards:
        x = forward(x, *args, **kwargs)
    return x


def _hand_on(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x


def _keeping(operators: Sequence[Any]) -> Callable[..., CheckpointPolicy]:
    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
