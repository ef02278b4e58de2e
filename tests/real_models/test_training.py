"""Whole training steps of real architectures: loss, every gradient and every buffer bitwise those of plain training.

Three steps of SGD each, dropout on, in fp32 and under bf16 autocast; every layer a region, the whole model one region,
and with the matrix products kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conformance.contenders import Elbowroom
from tests.conformance.equality import assert_same_bits, grads, random_streams, seed_everything
from tests.real_models.builders import OWN, TRANSFORMERS, Trainee

MODELS = {**TRANSFORMERS, **OWN}
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
STEPS = 3


def trained(
    build: Callable[[], Trainee], dtype: torch.dtype | None, apply: Callable[[Trainee], None] | None
) -> list[Any]:
    """What three training steps compute, step by step; ``apply`` wraps what it wants of the model first."""
    seed_everything(0)
    trainee = build()
    model = trainee.model.train()
    if apply is not None:
        apply(trainee)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen: list[Any] = []
    for step in range(STEPS):
        seed_everything(100 + step)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = trainee.loss(model)
        loss.backward()
        names = [name for name, _ in model.named_parameters()]
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        seen.append([loss.detach(), dict(zip(names, grads(model), strict=True)), buffers, random_streams()])
        optimizer.step()
        optimizer.zero_grad()
    return seen


def layers_of(contender: Any) -> Callable[[Trainee], None]:
    def apply(trainee: Trainee) -> None:
        for layer in trainee.layers:
            wrapped = contender.wrap(layer)
            if wrapped is not layer:  # a contender whose wrapper is another module
                _replace(trainee.model, layer, wrapped)

    return apply


def _replace(model: torch.nn.Module, layer: torch.nn.Module, by: torch.nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is layer:
                setattr(parent, name, by)


def whole_of(contender: Any) -> Callable[[Trainee], None]:
    def apply(trainee: Trainee) -> None:
        contender.wrap(trainee.model)

    return apply


@pytest.fixture(scope="module")
def plainly() -> Callable[[str, str], list[Any]]:
    """Plain training of a model, computed once."""
    known: dict[tuple[str, str], list[Any]] = {}

    def get(name: str, precision: str) -> list[Any]:
        key = (name, precision)
        if key not in known:
            known[key] = trained(MODELS[name], PRECISIONS[precision], None)
        return known[key]

    return get


@pytest.fixture(autouse=True)
def _same_python_random() -> None:
    random.seed(0)


# Every model and precision together, so that the plain run is shared.
BOTH = [pytest.param(m, p, id=f"{m}-{p}", marks=pytest.mark.xdist_group(m)) for m in MODELS for p in PRECISIONS]


@pytest.mark.parametrize(("name", "precision"), BOTH)
def test_every_layer_a_region(contender: Any, plainly: Any, name: str, precision: str) -> None:
    found = trained(MODELS[name], PRECISIONS[precision], layers_of(contender))
    assert_same_bits(plainly(name, precision), found, name)


@pytest.mark.parametrize(("name", "precision"), BOTH)
def test_whole_model_one_region(contender: Any, plainly: Any, name: str, precision: str) -> None:
    found = trained(MODELS[name], PRECISIONS[precision], whole_of(contender))
    assert_same_bits(plainly(name, precision), found, name)


@pytest.mark.parametrize(("name", "precision"), BOTH)
def test_matmuls_kept(elbowroom_only: None, plainly: Any, name: str, precision: str) -> None:
    found = trained(MODELS[name], PRECISIONS[precision], layers_of(Elbowroom(keep="matmuls")))
    assert_same_bits(plainly(name, precision), found, name)


@pytest.mark.parametrize("name", ["llama", "whisper", "resnet", "recurrent", "mixture"])
@pytest.mark.parametrize("keep", ["everything", "attention"])
def test_other_policies(elbowroom_only: None, plainly: Any, name: str, keep: str) -> None:
    found = trained(MODELS[name], None, layers_of(Elbowroom(keep=keep)))
    assert_same_bits(plainly(name, "fp32"), found, name)


@pytest.mark.parametrize("name", ["gpt2", "t5", "albert", "unet"])
def test_nested_regions(contender: Any, plainly: Any, name: str) -> None:
    """Every layer and the whole model: regions in a region."""

    def both(trainee: Trainee) -> None:
        layers_of(contender)(trainee)
        contender.wrap(trainee.model)

    assert_same_bits(plainly(name, "fp32"), trained(MODELS[name], None, both), name)
