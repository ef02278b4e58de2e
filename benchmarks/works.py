"""The works that are measured: a model, its inputs and its loss, the same bits at every call.

Shapes: B sequences, T tokens each, D = dim, H = heads, d = D / H, V = vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CausalSelfAttention(nn.Module):
    """Multi-head attention with one fused kernel: (B, T, D) to (B, T, D)."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        n_batch, n_tokens, dim = x.shape
        qkv = self.qkv(x).view(n_batch, n_tokens, 3, self.n_heads, dim // self.n_heads)  # (B, T, 3, H, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, H, T, d)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(n_batch, n_tokens, dim))
        return out


class GPTBlock(nn.Module):
    """Pre-norm: (B, T, D) to (B, T, D)."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = CausalSelfAttention(dim, n_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """Tokens (B, T) to logits (B, T, V). The head has a weight of its own."""

    def __init__(self, *, vocabulary: int, dim: int, n_heads: int, n_layers: int, sequence_length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.randn(sequence_length, dim) * 0.02)
        self.blocks = nn.ModuleList(GPTBlock(dim, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ResidualBlock(nn.Module):
    """A residual around layers so small that Python is all the cost: (B, D) to (B, D)."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x)
        return out


class Stack(nn.Module):
    """``blocks`` one after the other."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class Work:
    """A model whose repeated blocks are ``model.blocks``, what it is given, and the loss of what it returns."""

    name: str
    model: nn.Module
    inputs: Tensor
    loss_fn: Callable[[Tensor], Tensor]

    def sharing(self) -> Work:
        """The same work with other modules around the very same parameters: equal weights, and no memory for them."""
        shared: dict[int, object] = {id(t): t for t in chain(self.model.parameters(), self.model.buffers())}
        return Work(self.name, copy.deepcopy(self.model, shared), self.inputs, self.loss_fn)

    def backward(self) -> None:
        """Forward, loss and backward; leaves the gradients in the parameters."""
        torch.autograd.backward(self.loss_fn(self.model(self.inputs)))


def gpt(
    *,
    vocabulary: int = 8192,
    dim: int = 512,
    n_heads: int = 8,
    n_layers: int = 12,
    sequence_length: int = 512,
    batch_size: int = 4,
) -> Work:
    """The language model: at these defaults one logits tensor (64 MiB) weighs more than all block inputs (48 MiB)."""
    torch.manual_seed(0)
    model = GPT(vocabulary=vocabulary, dim=dim, n_heads=n_heads, n_layers=n_layers, sequence_length=sequence_length)
    generator = torch.Generator().manual_seed(7)
    tokens, targets = torch.randint(vocabulary, (2, batch_size, sequence_length), generator=generator)  # each (B, T)
    return Work("gpt", model, tokens, lambda logits: F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def overhead(*, after_each_linear: bool) -> Work:
    """12 residual blocks of 6 Linear(32), batch 8; GELU and LayerNorm after each Linear, or once per block."""
    torch.manual_seed(0)

    def layers() -> list[nn.Module]:
        made: list[nn.Module] = []
        for number in range(1, 7):
            made.append(nn.Linear(32, 32))
            if after_each_linear or number == 6:
                made += [nn.GELU(), nn.LayerNorm(32)]
        return made

    model = Stack([ResidualBlock(layers()) for _ in range(12)])
    # Torch's reentrant checkpoint gives no gradients unless an input of the block asks for one.
    inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(7)).requires_grad_()
    name = "overhead, 6 x (Linear GELU LayerNorm)" if after_each_linear else "overhead, 6 x Linear, GELU LayerNorm"
    return Work(name, model, inputs, lambda out: out.square().mean())
