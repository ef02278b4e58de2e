"""Regions: found by structure, in models of many shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elbowroom.errors import UsageError
from elbowroom.fitting.regions import describe_regions, find_regions
from elbowroom.models.gpt import GPT, GPTConfig
from tests.real_models import builders


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


def test_a_stage_that_happens_to_have_one_block() -> None:
    def stage(width: int, depth: int) -> nn.Module:
        return nn.Sequential(*(Block(width) for _ in range(depth)))

    model = Holder(
        stem=nn.Conv2d(3, 4, 3), layer1=stage(4, 1), layer2=stage(8, 2), layer3=stage(16, 1), fc=nn.Linear(16, 4)
    )
    assert names(model) == ["layer1.0", "layer2.0", "layer2.1", "layer3.0"]
    # All stages of one block: repeated all the same.
    assert names(Holder(layer1=stage(4, 1), layer2=stage(8, 1))) == ["layer1.0", "layer2.0"]
    # One block in one Sequential is not repeated.
    assert names(Holder(layer1=nn.Sequential(Holder(a=nn.Linear(4, 4))), fc=nn.Linear(4, 4))) == ["layer1", "fc"]


def test_transformer_of_torch_with_encoder_and_decoder() -> None:
    model = Holder(body=nn.Transformer(8, 2, 2, 3, 16, batch_first=True), head=nn.Linear(8, 8))
    found = [f"body.encoder.layers.{i}" for i in range(2)] + [f"body.decoder.layers.{i}" for i in range(3)]
    assert names(model) == found
    assert describe_regions(find_regions(model), model) == (
        "5 regions: body.encoder.layers.0, body.encoder.layers.1 (TransformerEncoderLayer), body.decoder.layers.0, "
        "body.decoder.layers.1, body.decoder.layers.2 (TransformerDecoderLayer); outside them: body.encoder.norm, "
        "body.decoder.norm, head"
    )


@pytest.mark.parametrize("name", ["llama", "t5", "whisper", "vit", "mixtral"])
def test_models_of_the_transformers_library(name: str) -> None:
    pytest.importorskip("transformers")
    trainee = builders.TRANSFORMERS[name]()
    assert [id(module) for module in find_regions(trainee.model).values()] == [id(layer) for layer in trainee.layers]


LAYERS = [f"encoder.layers.{i}" for i in range(3)] + [f"decoder.layers.{i}" for i in range(2)]


def towers() -> Holder:
    return Holder(
        encoder=Holder(layers=nn.ModuleList([Block(), Other(), Block()]), norm=nn.LayerNorm(4)),
        decoder=Holder(layers=nn.ModuleList([Other(), Other()])),
        head=nn.Linear(4, 4),
    )


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        (Other, ["encoder.layers.1", "decoder.layers.0", "decoder.layers.1"]),
        (Block, ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2", "decoder.layers.0", "decoder.layers.1"]),
        ("head", ["head"]),
        ("encoder.layers.0", ["encoder.layers.0"]),
        ("encoder.layers.*", ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2"]),
        ("encoder.layers.[02]", ["encoder.layers.0", "encoder.layers.2"]),
        ("*.layers.1", ["encoder.layers.1", "decoder.layers.1"]),
        ("**.1.inner", ["encoder.layers.1.inner", "decoder.layers.1.inner"]),
        ("dec**", ["decoder"]),  # not alone between dots: as a single star
        ("decoder.layers", ["decoder.layers.0", "decoder.layers.1"]),  # a list stands for its members
        ("*", ["encoder", "decoder", "head"]),
        ("", [""]),
        (["head", Other, "encoder.*"], ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2", "encoder.norm",
                                        "decoder.layers.0", "decoder.layers.1", "head"]),
        (nn.Sequential, [f"{layer}.experts.{i}" for layer in LAYERS for i in range(2)]),
    ],
)  # fmt: skip
def test_chosen_by_class_name_glob_or_a_mixture(chosen: Any, found: list[str]) -> None:
    regions = find_regions(towers(), chosen)
    assert list(regions) == found
    assert list(find_regions(towers(), [chosen] if isinstance(chosen, (str, type)) else tuple(chosen))) == found


def test_the_outer_one_of_nested_choices_wins_and_it_is_said() -> None:
    model = towers()
    found = find_regions(model, ["**.inner", "decoder.layers.*", nn.LayerNorm])
    assert list(found) == [
        "encoder.layers.0.inner", "encoder.layers.1.inner", "encoder.layers.2.inner", "encoder.norm",
        "decoder.layers.0", "decoder.layers.1",
    ]  # fmt: skip
    assert found.inside == {f"decoder.layers.{i}.inner": f"decoder.layers.{i}" for i in range(2)}
    text = describe_regions(found, model)
    assert text.endswith("; 2 chosen inside others are part of those (decoder.layers.0.inner of decoder.layers.0)")
    assert find_regions(model, ["", "head"]).inside == {"head": ""}


def test_shared_blocks_are_chosen_once_under_any_of_their_names() -> None:
    shared = Block()
    model = Holder(layers=nn.ModuleList([shared, Block()]), again=nn.ModuleList([shared, Block()]))
    assert list(find_regions(model, Block)) == ["layers.0", "layers.1", "again.1"]
    assert list(find_regions(model, "again.*")) == ["again.0", "again.1"]
    assert list(find_regions(model, ["again.*", "layers.*"])) == ["layers.0", "layers.1", "again.1"]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("encoder.layer.0", r"'encoder\.layer\.0' matches no module of this model; near it: encoder\.layers\.0"),
        ("encodr.norm", "matches no module of this model; near it: encoder.norm"),
        ("layers.*", r"'\*\*\.layers\.\*' would match encoder\.layers\.0, .*, encoder\.layers\.2 and 2 more"),
        ("Other", r"it is the class of encoder\.layers\.1, .*: give the class itself, or those names"),
        ("xyz", "matches no module of this model; it begins with encoder, decoder, head"),
        (nn.LSTM, r"no module of this model is a LSTM; it has Holder, ModuleList, Block, Linear, Sequential, GELU and"),
        (type("Others", (nn.Module,), {}), "is a Others; it has Other"),
        ([], r"regions=\[\] chooses no region"),
        (3, "regions: 3 is neither a class of modules nor a name or glob"),
        (int, "regions: <class 'int'> is neither a class"),
        (nn.Linear(2, 2), "regions: a Linear object is neither a class"),
        (["head", None], "regions: None is neither a class"),
    ],
)
def test_a_choice_that_means_nothing_is_named(chosen: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_regions(towers(), chosen)


def test_a_list_without_anything_to_call() -> None:
    with pytest.raises(UsageError, match="'empty' is a ModuleList without anything to call in it"):
        find_regions(Holder(empty=nn.ModuleList()), "empty")


def test_what_was_chosen_is_said_in_a_line() -> None:
    gpt = GPT(GPTConfig(dim=32, n_layers=12, n_heads=2))
    text = describe_regions(find_regions(gpt), gpt)
    assert text.startswith(f"12 regions: blocks.0 ... blocks.11 ({type(gpt.blocks[0]).__name__}); outside them: ")
    assert "blocks" not in text.partition("outside")[2]
    layer = nn.Linear(4, 4)
    assert describe_regions(find_regions(layer), layer) == "1 region: the model itself (Linear)"
    model = towers()
    assert describe_regions(find_regions(model, "encoder.layers.*"), model) == (
        "3 regions: encoder.layers.0, encoder.layers.1, encoder.layers.2 (Block, Other); outside them: encoder.norm, "
        "decoder, head"
    )
    every_second = [f"blocks.{i}" for i in range(0, 12, 2)]
    assert describe_regions(find_regions(gpt, every_second), gpt).startswith(
        "6 regions: blocks.0, blocks.2 ... blocks.10 ("
    )
