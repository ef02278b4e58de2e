"""The model: exact sizes, causality, and what its sources say of it."""

from __future__ import annotations

import math

import pytest
import torch

from elbowroom.models.gpt import GPT, PRESETS, GPTConfig, rotate


@pytest.mark.parametrize(
    ("preset", "n_parameters"),
    [
        # GPT-2 as released: the counts of the four checkpoints, head tied.
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("tiny", 826_112),
        ("small", 4_804_608),
        ("medium", 37_960_704),
    ],
)
def test_preset_has_the_exact_number_of_parameters(preset: str, n_parameters: int) -> None:
    with torch.device("meta"):
        model = GPT(PRESETS[preset])
    assert sum(parameter.numel() for parameter in model.parameters()) == n_parameters


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_no_token_sees_a_later_one(positions: str) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(dim=32, n_layers=2, n_heads=2, sequence_length=16, positions=positions)).eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])


def test_loss_is_the_mean_cross_entropy_in_nats_and_starts_near_uniform() -> None:
    torch.manual_seed(0)
    model = GPT(PRESETS["tiny"])
    tokens = torch.randint(256, (2, 65))
    logits, loss = model(tokens[:, :-1], tokens[:, 1:])
    assert logits.shape == (2, 64, 256)
    picked = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])
    torch.testing.assert_close(loss, -picked.mean())
    assert abs(loss.item() - math.log(256)) < 0.1


def test_initialisation_follows_gpt2() -> None:
    torch.manual_seed(0)
    config = GPTConfig(dim=256, n_layers=8, n_heads=4)
    model = GPT(config)
    assert model.head.weight is model.tokens.weight
    for block in model.blocks:
        assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
        for projection in (block.attention.proj, block.mlp.proj):
            assert projection.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
            assert not projection.bias.any()


def test_rotary_scores_depend_only_on_distance() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    turned_q = rotate(q.expand(1, 1, 10, 8))[0, 0]
    turned_k = rotate(k.expand(1, 1, 10, 8))[0, 0]
    scores = turned_q @ turned_k.T
    for distance in range(10):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert not math.isclose(scores[5, 0].item(), scores[1, 0].item(), rel_tol=1e-3)


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(dim=32, n_layers=2, n_heads=2, dropout=0.5))
    tokens = torch.randint(256, (1, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_generate_continues_and_leaves_training_flags_alone() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(dim=32, n_layers=2, n_heads=2, sequence_length=8, dropout=0.5)).train()
    model.blocks[0].eval()
    flags = [module.training for module in model.modules()]
    prompt = torch.randint(256, (2, 5))
    likeliest = model.generate(prompt, 6, temperature=0)
    assert likeliest.shape == (2, 11)
    assert torch.equal(likeliest[:, :5], prompt)
    assert torch.equal(likeliest, model.generate(prompt, 6, temperature=0))
    sampled = [model.generate(prompt, 6, generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*sampled)
    assert [module.training for module in model.modules()] == flags


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dim": 10, "n_heads": 3}, "dim 10 is not a multiple of n_heads 3"),
        ({"positions": "sine"}, "positions must be 'learned' or 'rotary', not 'sine'"),
        ({"dim": 12, "n_heads": 4, "positions": "rotary"}, "rotary positions need an even head width, not 3"),
    ],
)
def test_impossible_dimensions_are_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        GPTConfig(**wrong)  # type: ignore[arg-type]


def test_too_long_a_sequence_is_named() -> None:
    model = GPT(GPTConfig(dim=32, n_layers=1, n_heads=2, sequence_length=8))
    with pytest.raises(ValueError, match="9 tokens given, but this model was built for at most 8"):
        model(torch.zeros(1, 9, dtype=torch.int64))
