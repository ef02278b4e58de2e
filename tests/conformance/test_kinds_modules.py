"""Wrapped modules, beyond cases 068-071: the same object, the same names, the same life."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.equality import assert_same_bits, grads


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("scale", torch.ones(width), persistent=False)

    def forward(self, x: torch.Tensor, *, power: int = 2) -> torch.Tensor:
        return self.norm(torch.tanh(self.lin(x))).pow(power) * self.scale

    def __len__(self) -> int:
        return 7

    @property
    def width(self) -> int:
        return self.lin.in_features


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), Block(), Block(), nn.Linear(4, 1))


def wrapped(contender: Any, seed: int = 0) -> nn.Sequential:
    model = net(seed)
    for n in (1, 2):
        model[n] = contender.wrap(model[n])
    return model


def step(model: nn.Module, seed: int = 1) -> list[Any]:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    loss = model(x).pow(2).sum()
    loss.backward()
    return [loss.detach(), grads(model), [b.clone() for b in model.buffers()]]


def test_kind_068_names_types_and_tree(contender: Any) -> None:
    """All names in order, types, children, repr and parameter identity are those of the bare model."""
    bare, model = net(), wrapped(contender)
    for of in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert [n for n, _ in getattr(bare, of)()] == [n for n, _ in getattr(model, of)()]
    assert [type(m).__qualname__ for m in bare.modules()] == [type(m).__qualname__ for m in model.modules()]
    assert all(isinstance(m, type(b)) for b, m in zip(bare.modules(), model.modules(), strict=True))
    assert repr(bare) == repr(model)
    assert list(bare.state_dict()) == list(model.state_dict())
    assert len(model[1]) == 7
    assert model[1].width == 4


def test_kind_068_wrap_gives_the_same_object(contender: Any) -> None:
    block = Block()
    assert contender.wrap(block) is block


def test_kind_068_wrap_twice_and_unwrap(contender: Any, elbowroom_only: None) -> None:
    """Wrapping is undone completely; wrapping twice is one region, not two."""
    import elbowroom

    block = Block()
    before = set(vars(block))
    contender.wrap(contender.wrap(block))
    assert elbowroom.unwrap(block) is block
    assert set(vars(block)) == before
    assert "forward" not in vars(block)
    assert type(block) is Block


def test_kind_068_trains_as_bare(contender: Any) -> None:
    bare, model = net(), wrapped(contender)
    for seed in range(4):
        assert_same_bits(step(bare, seed), step(model, seed))


def test_kind_069_snapshots_go_both_ways(contender: Any) -> None:
    """state_dict through a file, strict, both ways, also into a model made on the meta device."""
    bare, model = net(1), wrapped(contender, 2)
    file = io.BytesIO()
    torch.save(bare.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file), strict=True)
    assert_same_bits(step(bare), step(model))
    with torch.device("meta"):
        empty = wrapped(contender)
    empty.load_state_dict(bare.state_dict(), strict=True, assign=True)
    for m in empty.modules():
        if isinstance(m, Block):
            m.scale = torch.ones(4)
    empty.eval()
    bare.eval()
    assert_same_bits(step(bare), step(empty))


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_kind_070_copies_are_whole_and_separate(contender: Any, way: str) -> None:
    """A copy (also after training steps) checkpoints with its own weights; the original is untouched."""
    model = wrapped(contender)
    first = step(model)
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert_same_bits(step(copy.deepcopy(model), 2), step(twin, 2))
    twin.zero_grad()
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    model.load_state_dict(net().state_dict())
    assert_same_bits(first, step(model))
    assert all(p.grad is None for p in twin.parameters())
    twin(torch.randn(3, 4)).sum().backward()
    assert any(p.grad is not None for p in twin.parameters())


def test_kind_071_moves_casts_and_modes(contender: Any) -> None:
    """to(), double(), half-precision, train(), eval(), requires_grad_, apply and share_memory go through."""
    bare, model = net(), wrapped(contender)
    for change in (
        lambda m: m.double(),
        lambda m: m.float(),
        lambda m: m.eval(),
        lambda m: m.train(),
        lambda m: m[1].requires_grad_(False) and m,
        lambda m: m.apply(lambda part: setattr(part, "seen", 1)),
        lambda m: m.to(torch.float32),
    ):
        change(bare)
        change(model)
        x = torch.ones(5, 4, dtype=next(bare.parameters()).dtype)
        for m in (bare, model):
            m.zero_grad()
            m(x).sum().backward()
        assert_same_bits(grads(bare), grads(model))


def test_kind_071_methods_that_call_forward(contender: Any) -> None:
    """Keywords to forward, forward called by name, and a subclass's super().forward()."""

    class Child(Block):
        def forward(self, x: torch.Tensor, *, power: int = 2) -> torch.Tensor:
            return super().forward(x, power=power) + 1

        def twice(self, x: torch.Tensor) -> torch.Tensor:
            return self.forward(self(x, power=3))

    torch.manual_seed(0)
    bare = Child()
    model = contender.wrap(copy.deepcopy(bare))
    for _ in range(3):
        x = torch.randn(6, 4)
        for m in (bare, model):
            m.zero_grad()
            m.twice(x).sum().backward()
        assert_same_bits(grads(bare), grads(model))


def test_kind_071_nested_wraps(contender: Any) -> None:
    """A wrapped module inside a wrapped module, and one module at two places of the tree."""

    def build(wrap: Any) -> nn.Sequential:
        torch.manual_seed(0)
        inner = wrap(Block())
        return wrap(nn.Sequential(inner, nn.Tanh(), wrap(nn.Sequential(inner, nn.Linear(4, 4)))))

    bare, model = build(lambda m: m), build(contender.wrap)
    for seed in range(3):
        assert_same_bits(step(bare, seed), step(model, seed))
