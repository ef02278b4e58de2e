"""Tiny models with random weights: nine of the transformers library, and a few of our own.

Every builder gives a model in training mode (dropout on) and a function that makes one batch and returns the loss.
No weights are downloaded: configurations are made here, with the smallest sizes that keep every kind of layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 64
TOKENS = 12


class Trainee(NamedTuple):
    """A model, its loss on one fresh batch, and the layers that are wrapped one by one."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    layers: list[nn.Module]


def _tokens() -> Tensor:
    return torch.randint(1, VOCABULARY, (2, TOKENS))


def _causal_loss(model: nn.Module) -> Tensor:
    ids = _tokens()
    return model(input_ids=ids, labels=ids).loss


def llama() -> Trainee:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    return Trainee(model, _causal_loss, list(model.model.layers))


def qwen3() -> Trainee:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    return Trainee(model, _causal_loss, list(model.model.layers))


def gpt2() -> Trainee:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=4, use_cache=False)
    )
    return Trainee(model, _causal_loss, list(model.transformer.h))


def bert() -> Trainee:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=16,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    return Trainee(model, _causal_loss, list(model.bert.encoder.layer))


def t5() -> Trainee:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    return Trainee(model, _causal_loss, [*model.encoder.block, *model.decoder.block])


def vit() -> Trainee:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=8,
        num_labels=4, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    model = ViTForImageClassification(config)

    def loss(model: nn.Module) -> Tensor:
        return model(pixel_values=torch.randn(2, 3, 16, 16), labels=torch.randint(0, 4, (2,))).loss

    return Trainee(model, loss, list(next(m for m in model.modules() if isinstance(m, nn.ModuleList))))


def mixtral() -> Trainee:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, attention_dropout=0.1, use_cache=False,
        output_router_logits=True,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    return Trainee(model, _causal_loss, list(model.model.layers))


def mamba() -> Trainee:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2, use_cache=False)
    model = MambaForCausalLM(config)
    return Trainee(model, _causal_loss, list(model.backbone.layers))


def whisper() -> Trainee:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_source_positions=16, max_target_positions=16, dropout=0.1, attention_dropout=0.1,
        encoder_layerdrop=0.2, decoder_layerdrop=0.2, use_cache=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)

    def loss(model: nn.Module) -> Tensor:
        return model(input_features=torch.randn(2, 8, 32), labels=_tokens()).loss

    return Trainee(model, loss, [*model.model.encoder.layers, *model.model.decoder.layers])


class Residual(nn.Module):
    """A ResNet block: BatchNorm, ReLU in place, dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Dropout2d(0.2),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += x
        return F.relu(out, inplace=True)


def resnet() -> Trainee:
    blocks = [Residual(8) for _ in range(3)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(torch.randn(4, 3, 10, 10)), torch.randint(0, 4, (4,)))

    return Trainee(model, loss, blocks)


def _convolution(given: int, made: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(given, made, 3, padding=1), nn.GroupNorm(1, made), nn.SiLU(inplace=True))


class UNet(nn.Module):
    """Two levels down and up, skip connections across regions, an input that two blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = _convolution(3, 4), _convolution(4, 8), _convolution(8, 8)
        self.up2, self.up1 = _convolution(16, 4), _convolution(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        c = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        return self.up1(torch.cat([F.interpolate(c, scale_factor=2, mode="bilinear"), a], 1))


def unet() -> Trainee:
    model = UNet()

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(2, 3, 8, 8)
        return F.mse_loss(model(x + 0.1 * torch.randn_like(x)), x)

    return Trainee(model, loss, [model.down1, model.down2, model.middle, model.up2, model.up1])


class Albert(nn.Module):
    """One block called six times: shared weights, one program, many tapes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for _ in range(6):
            x = self.block(x)
        return self.head(x)


def albert() -> Trainee:
    model = Albert()

    def loss(model: nn.Module) -> Tensor:
        ids = _tokens()
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    return Trainee(model, loss, [model.block])


class Recurrent(nn.Module):
    """A cell stepped by hand under a whole LSTM: gradients through time, one region per step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.cell = nn.LSTMCell(8, 8)
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(x)
        h = c = x.new_zeros(x.shape[0], 8)
        outs = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            outs.append(self.head(h))
        return torch.stack(outs, 1)


def recurrent() -> Trainee:
    model = Recurrent()

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(3, 7, 6)
        return F.mse_loss(model(x), x.roll(-1, 1))

    return Trainee(model, loss, [model.lstm, model.cell, model.head])


class Mixture(nn.Module):
    """Top-2 routing with a load counter and a bias that the load steers (no auxiliary loss)."""

    def __init__(self, width: int = 8, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width)) for _ in range(experts)
        )
        self.register_buffer("load", torch.zeros(experts))
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        index = (scores + self.bias).topk(2, -1).indices
        weight = scores.gather(-1, index)
        out = torch.zeros_like(x)
        counts = torch.bincount(index.flatten(), minlength=len(self.experts))
        self.load += counts
        with torch.no_grad():
            self.bias += 0.01 * (counts.float().mean() - counts).sign()
        for n, expert in enumerate(self.experts):
            token, slot = (index == n).nonzero(as_tuple=True)
            if token.numel():
                out.index_add_(0, token, (expert(x[token]) * weight[token, slot, None]).to(out.dtype))
        return x + out


def mixture() -> Trainee:
    layers = [Mixture() for _ in range(2)]
    model = nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 6))

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(20, 6)
        return F.mse_loss(model(x), x.sin())

    return Trainee(model, loss, layers)


TRANSFORMERS = {f.__name__: f for f in (llama, qwen3, gpt2, bert, t5, vit, mixtral, mamba, whisper)}
OWN = {f.__name__: f for f in (resnet, unet, albert, recurrent, mixture)}
