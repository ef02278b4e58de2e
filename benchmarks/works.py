"""The works that are measured: a model, its inputs and its loss, the same bits at every call.

Shapes: B sequences, T tokens each, D = dim, H = heads, d = D / H, V = vocabulary. Pictures: (B, channels, R, R).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

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


class ConvNorm(nn.Module):
    """Convolution, BatchNorm and, if ``activated``, ReLU: (B, n_in, R, R) to (B, n_out, R / stride, R / stride)."""

    def __init__(
        self, n_in: int, n_out: int, kernel: int, stride: int = 1, *, activated: bool = True, in_place: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(n_out)
        self.activation = nn.ReLU(in_place) if activated else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.norm(self.conv(x)))
        return out


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut: (B, n_in, R, R) to (B, 4 width, R / stride, R / stride)."""

    def __init__(self, n_in: int, width: int, stride: int, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.body = nn.Sequential(
            ConvNorm(n_in, width, 1, in_place=in_place),
            ConvNorm(width, width, 3, stride, in_place=in_place),
            ConvNorm(width, 4 * width, 1, activated=False),
        )
        widens = stride != 1 or n_in != 4 * width
        self.shortcut = ConvNorm(n_in, 4 * width, 1, stride, activated=False) if widens else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_place:
            return F.relu(self.body(x) + self.shortcut(x))
        out: Tensor = self.body(x)
        out += self.shortcut(x)
        return F.relu(out, inplace=True)


class ResNet50(nn.Module):
    """He et al. 2016, table 1, with the stride in the 3x3 convolution: (B, 3, R, R) to (B, classes)."""

    def __init__(self, *, n_classes: int, in_place: bool) -> None:
        super().__init__()
        self.stem = ConvNorm(3, 64, 7, 2, in_place=in_place)
        blocks, n_in = [], 64
        for width, n_blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(n_blocks):
                blocks.append(Bottleneck(n_in, width, stride if number == 0 else 1, in_place=in_place))
                n_in = 4 * width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(n_in, n_classes)

    def forward(self, pictures: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(pictures), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


@dataclass(frozen=True)
class Work:
    """A model, the name of the list of its repeated blocks, what it is given, and the loss of what it returns."""

    name: str
    model: nn.Module
    inputs: Tensor
    loss_fn: Callable[[Any], Tensor]
    blocks_name: str = "blocks"

    @property
    def blocks(self) -> list[nn.Module]:
        """The repeated blocks, in the order in which they are called."""
        return list(self.model.get_submodule(self.blocks_name).children())

    def sharing(self) -> Work:
        """The same work with other modules around the very same parameters: equal weights, and no memory for them.

        Buffers are copied: BatchNorm writes its own in every step.
        """
        shared: dict[int, object] = {id(parameter): parameter for parameter in self.model.parameters()}
        return Work(self.name, copy.deepcopy(self.model, shared), self.inputs, self.loss_fn, self.blocks_name)

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


def deep(
    *,
    vocabulary: int = 512,
    dim: int = 384,
    n_heads: int = 6,
    n_layers: int = 24,
    sequence_length: int = 512,
    batch_size: int = 2,
) -> Work:
    """A language model in which the blocks are all that counts: 24 of them, and a head of 512 logits."""
    work = gpt(
        vocabulary=vocabulary,
        dim=dim,
        n_heads=n_heads,
        n_layers=n_layers,
        sequence_length=sequence_length,
        batch_size=batch_size,
    )
    return replace(work, name="deep")


def conv(*, batch_size: int = 16, resolution: int = 128, n_classes: int = 1000, in_place: bool = False) -> Work:
    """ResNet-50: stages of different widths, BatchNorm; ``in_place``: ReLU and the residual sum write in place."""
    torch.manual_seed(0)
    model = ResNet50(n_classes=n_classes, in_place=in_place)
    generator = torch.Generator().manual_seed(7)
    pictures = torch.randn(batch_size, 3, resolution, resolution, generator=generator)
    classes = torch.randint(n_classes, (batch_size,), generator=generator)
    name = "conv, in place" if in_place else "conv"
    return Work(name, model, pictures, lambda logits: F.cross_entropy(logits, classes))


def llama(
    *,
    vocabulary: int = 2048,
    dim: int = 256,
    n_heads: int = 4,
    n_layers: int = 8,
    sequence_length: int = 256,
    batch_size: int = 4,
) -> Work:
    """Llama of transformers with random weights: rotary positions, grouped queries, gated MLP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**_sizes(vocabulary, dim, n_heads, n_layers, sequence_length)))
    return _next_token_work("llama", model, vocabulary, sequence_length, batch_size)


def mixtral(
    *,
    vocabulary: int = 2048,
    dim: int = 256,
    n_heads: int = 4,
    n_layers: int = 8,
    n_experts: int = 4,
    sequence_length: int = 256,
    batch_size: int = 4,
) -> Work:
    """Mixtral of transformers with random weights: two of the experts for every token, so shapes depend on the data."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = _sizes(vocabulary, dim, n_heads, n_layers, sequence_length)
    model = MixtralForCausalLM(MixtralConfig(num_local_experts=n_experts, num_experts_per_tok=2, **sizes))
    return _next_token_work("mixtral", model, vocabulary, sequence_length, batch_size)


def _sizes(vocabulary: int, dim: int, n_heads: int, n_layers: int, sequence_length: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": dim,
        "intermediate_size": dim // 6 * 16,  # 8/3 of dim; grouped products want rows of 16 bytes
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_heads // 2,
        "max_position_embeddings": sequence_length,
        "use_cache": False,
    }


def _next_token_work(name: str, model: nn.Module, vocabulary: int, sequence_length: int, batch_size: int) -> Work:
    generator = torch.Generator().manual_seed(7)
    tokens, targets = torch.randint(vocabulary, (2, batch_size, sequence_length), generator=generator)  # each (B, T)

    def loss(out: Any) -> Tensor:
        return F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())

    return Work(name, model.train(), tokens, loss, "model.layers")


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
