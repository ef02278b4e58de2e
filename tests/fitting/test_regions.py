"""Regions: found by structure, in models of many shapes."""

from __future__ import annotations

import torch
from torch import nn

from elbowroom.fitting.regions import find_regions
from elbowroom.models.gpt import GPT, GPTConfig


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts[0](self.inner(x))


class Other(Block):
    pass


class Holder(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def names(model: nn.Module) -> list[str]:
    regions = find_regions(model)
    assert all(model.get_submodule(name) is module for name, module in regions.items())
    return list(regions)


def test_blocks_of_a_gpt() -> None:
    model = GPT(GPTConfig(dim=32, n_layers=3, n_heads=2))
    assert names(model) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_list_of_one_block_is_a_model_of_depth_one() -> None:
    assert names(GPT(GPTConfig(dim=32, n_layers=1, n_heads=2))) == ["blocks.0"]


def test_outermost_blocks_win_over_those_inside() -> None:
    model = Holder(body=Holder(layers=nn.ModuleList([Block(), Block()])), head=nn.Linear(4, 4))
    assert names(model) == ["body.layers.0", "body.layers.1"]


def test_several_lists_and_mixed_kinds() -> None:
    model = Holder(
        encoder=nn.ModuleList([Block(), Other(), Block(), nn.LayerNorm(4)]),
        decoder=nn.ModuleList([Other(), Other()]),
    )
    assert names(model) == ["encoder.0", "encoder.1", "encoder.2", "decoder.0", "decoder.1"]


def test_stages_of_sequentials_give_their_blocks() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Sequential(Block(), Block()),
        nn.Sequential(Block(), Block(), Block()),
        nn.Linear(4, 4),
    )
    assert names(model) == ["1.0", "1.1", "2.0", "2.1", "2.2"]


def test_repeated_sequentials_of_single_layers_are_blocks() -> None:
    def stage() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.GELU())

    assert names(Holder(features=nn.Sequential(stage(), stage(), nn.Dropout()))) == [
        "features.0",
        "features.1",
    ]


def test_without_repetition_the_direct_children() -> None:
    model = Holder(first=nn.Linear(4, 4), second=Holder(a=nn.Linear(4, 4)), third=nn.ModuleList([nn.GELU()]))
    assert names(model) == ["first", "second", "third.0"]
    assert names(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))) == ["0", "1", "2"]


def test_a_single_layer_is_its_own_region() -> None:
    layer = nn.Linear(4, 4)
    assert find_regions(layer) == {"": layer}


def test_a_shared_block_is_one_region() -> None:
    shared = Block()
    model = Holder(layers=nn.ModuleList([shared, Block()]), again=nn.ModuleList([shared, Block()]))
    assert names(model) == ["layers.0", "layers.1", "again.1"]
