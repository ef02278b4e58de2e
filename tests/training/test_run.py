"""The parts of a run: optimizer, schedule, device, the plain twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from elbowroom.errors import UsageError
from elbowroom.training.config import TrainConfig
from elbowroom.training.run import evaluate, learning_rate, sample_text, set_up, training_step, usable_device

Configured = Callable[..., TrainConfig]


def test_only_matrices_are_decayed(configured: Configured) -> None:
    run = set_up(configured())
    decayed, free = run.optimizer.param_groups
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in free["params"]} == {1}
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    n_parameters = len(list(run.model.parameters()))
    assert len(decayed["params"]) + len(free["params"]) == n_parameters


def test_learning_rate_rises_linearly_and_falls_as_a_cosine_to_a_tenth(configured: Configured) -> None:
    config = configured(learning_rate=1.0, warmup_steps=4, max_steps=104)
    rates = [learning_rate(step, config) for step in range(105)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[54] == pytest.approx(0.55)
    assert rates[104] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(0, configured(learning_rate=1.0, warmup_steps=0)) == 1.0


def test_the_plain_twin_shares_every_parameter_and_its_gradient(configured: Configured) -> None:
    run = set_up(configured())
    assert run.plain is not run.model
    names = dict(run.model.named_parameters())
    assert all(names[name] is parameter for name, parameter in run.plain.named_parameters())
    assert run.plain.head.weight is run.plain.tokens.weight
    training_step(run, run.plain, run.data.batch(0), 0.1)
    tokens, targets = run.data.batch(1)
    run.model.eval()
    run.plain.eval()
    assert torch.equal(run.model(tokens, targets)[1], run.plain(tokens, targets)[1])


def test_a_step_clips_and_leaves_no_gradient(configured: Configured) -> None:
    run = set_up(configured(gradient_clip=1e-6, learning_rate=1.0))
    seen = []
    run.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(
            torch.stack([p.grad.norm() for group in optimizer.param_groups for p in group["params"]]).norm().item()
        )
    )
    loss, norm = training_step(run, run.model, run.data.batch(0), 1e-3)
    assert norm.item() > 0.1
    assert seen[0] == pytest.approx(1e-6, rel=1e-2)
    assert not loss.requires_grad
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_evaluation_leaves_flags_streams_and_weights_alone(configured: Configured) -> None:
    run = set_up(configured(dropout=0.5))
    run.model.blocks[1].eval()
    flags = [module.training for module in run.model.modules()]
    stream = torch.get_rng_state()
    once, twice = evaluate(run), evaluate(run)
    assert once == twice
    assert [module.training for module in run.model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_sample_is_repeatable_and_disturbs_no_stream(configured: Configured) -> None:
    run = set_up(configured(sample_tokens=12))
    stream = torch.get_rng_state()
    assert sample_text(run) == sample_text(run)
    assert torch.equal(torch.get_rng_state(), stream)
    assert sample_text(set_up(configured(sample_tokens=0))) is None


@pytest.mark.parametrize("name", ["nonsense", "cuda:99", "meta:x"])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^--device {name}: cannot be used here: .+"):
        usable_device(name)
