"""A pre-norm GPT in plain torch: it imports nothing else, so that it can be read and copied on its own.

Shapes: B sequences, T tokens each, D = dim, H = n_heads, d = D / H, V = vocabulary.
Sources: Radford et al. 2019 (GPT-2: pre-norm, GELU, learned positions, tied head, residual projections
initialised with std 0.02 / sqrt(2 * n_layers)); Su et al. 2021 (rotary positions, arXiv:2104.09864,
equation 34).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """The dimensions of one GPT; ``PRESETS`` holds the named ones."""

    vocabulary: int = 256
    """number of distinct tokens"""
    sequence_length: int = 256
    """longest sequence, tokens"""
    dim: int = 128
    """width of the residual stream"""
    n_layers: int = 4
    """number of blocks"""
    n_heads: int = 4
    """attention heads per block; must divide dim"""
    dropout: float = 0.0
    """probability of dropping a value: after the embedding, in the attention, after each residual branch"""
    positions: str = "learned"
    """'learned' (a table, as GPT-2) or 'rotary' (queries and keys are turned by their position)"""
    bias: bool = True
    """biases in the linear layers and norms, as GPT-2"""

    def __post_init__(self) -> None:
        if self.dim % self.n_heads:
            raise ValueError(f"dim {self.dim} is not a multiple of n_heads {self.n_heads}")
        if self.positions not in ("learned", "rotary"):
            raise ValueError(f"positions must be 'learned' or 'rotary', not {self.positions!r}")
        if self.positions == "rotary" and (self.dim // self.n_heads) % 2:
            raise ValueError(f"rotary positions need an even head width, not {self.dim // self.n_heads}")


_BYTES = GPTConfig(positions="rotary")
_GPT2 = GPTConfig(vocabulary=50257, sequence_length=1024, dropout=0.1, dim=768, n_layers=12, n_heads=12)

PRESETS: dict[str, GPTConfig] = {
    # Byte-level models for a laptop: vocabulary 256, and rotary positions, which learn much faster.
    "tiny": replace(_BYTES, dim=128, n_layers=4, n_heads=4, sequence_length=128),
    "small": replace(_BYTES, dim=256, n_layers=6, n_heads=8, sequence_length=512),
    "medium": replace(_BYTES, dim=512, n_layers=12, n_heads=8, sequence_length=512),
    # The four sizes of GPT-2 (Radford et al. 2019, table 2; parameter counts as released).
    "gpt2": _GPT2,
    "gpt2-medium": replace(_GPT2, dim=1024, n_layers=24, n_heads=16),
    "gpt2-large": replace(_GPT2, dim=1280, n_layers=36, n_heads=20),
    "gpt2-xl": replace(_GPT2, dim=1600, n_layers=48, n_heads=25),
}


class CausalSelfAttention(nn.Module):
    """Every token attends to itself and to those before it: (B, T, D) to (B, T, D)."""

    def __init__(
        self, dim: int, n_heads: int, *, dropout: float = 0.0, rotary: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.dropout = dropout
        self.rotary = rotary
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.proj = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        n_batch, n_tokens, dim = x.shape
        qkv = self.qkv(x).view(n_batch, n_tokens, 3, self.n_heads, dim // self.n_heads)  # (B, T, 3, H, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, H, T, d)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )  # (B, H, T, d)
        y = self.proj(y.transpose(1, 2).reshape(n_batch, n_tokens, dim))  # (B, T, D)
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    """Widens four times, GELU, narrows again: (B, T, D) to (B, T, D)."""

    def __init__(self, dim: int, *, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.dropout = dropout
        self.fc = nn.Linear(dim, 4 * dim, bias=bias)
        self.proj = nn.Linear(4 * dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.fc(x), approximate="tanh")  # (B, T, 4D)
        return F.dropout(self.proj(hidden), self.dropout, self.training)


class GPTBlock(nn.Module):
    """One pre-norm block, the unit of the model: (B, T, D) to (B, T, D)."""

    def __init__(
        self, dim: int, n_heads: int, *, dropout: float = 0.0, rotary: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, bias=bias)
        self.attention = CausalSelfAttention(dim, n_heads, dropout=dropout, rotary=rotary, bias=bias)
        self.norm2 = nn.LayerNorm(dim, bias=bias)
        self.mlp = MLP(dim, dropout=dropout, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """Tokens in, logits of the next token out. The head shares its weight with the token embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.sequence_length, config.dim) if learned else None
        self.blocks = nn.ModuleList(
            GPTBlock(config.dim, config.n_heads, dropout=config.dropout, rotary=not learned, bias=config.bias)
            for _ in range(config.n_layers)
        )
        self.norm = nn.LayerNorm(config.dim, bias=config.bias)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)
        residual_std = 0.02 / math.sqrt(2 * config.n_layers)
        for name, parameter in self.named_parameters():
            # Each block adds twice to the residual stream; scaled so that its variance does not grow with
            # depth.
            if name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=residual_std)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """``tokens`` and ``targets``: (B, T) int64. Returns logits (B, T, V), with targets also the mean
        loss in nats.

        Raises ValueError if T is longer than the model's ``sequence_length``.
        """
        n_tokens = tokens.shape[1]
        if n_tokens > self.config.sequence_length:
            raise ValueError(
                f"{n_tokens} tokens given, but this model was built for at most "
                f"{self.config.sequence_length}; shorten the input or build it with a longer sequence_length"
            )
        x = self.tokens(tokens)  # (B, T, D)
        if self.positions is not None:
            x = x + self.positions(torch.arange(n_tokens, device=tokens.device))
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))  # (B, T, V)
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        n_new: int,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continues ``tokens`` (B, T) by ``n_new`` sampled tokens: (B, T + n_new). Temperature 0 takes the
        likeliest.

        Runs in eval mode and leaves each module's training flag as it found it.
        """
        was_training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            for _ in range(n_new):
                logits = self(tokens[:, -self.config.sequence_length :])[:, -1].float()  # (B, V)
                if temperature == 0:
                    new = logits.argmax(-1, keepdim=True)  # (B, 1)
                else:
                    new = torch.multinomial(F.softmax(logits / temperature, -1), 1, generator=generator)
                tokens = torch.cat([tokens, new], dim=1)
        finally:
            for module in was_training:
                module.training = True
        return tokens


def rotate(x: Tensor) -> Tensor:
    """Turns each pair (i, i + d/2) of x (B, H, T, d) by its token's position times 10000^(-2i/d)."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)  # (d/2,)
    positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)  # (T,)
    angles = positions[:, None] * frequencies  # (T, d/2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
