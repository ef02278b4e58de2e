"""What is read from an operator's schema: writes, views, draws, talks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # registers the communication operators
from torch import Tag

from elbowroom.core.operators import facts_of, written_arguments

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "writes"),
    [
        (aten.mm.default, ()),
        (aten.add_.Tensor, ((0, "self", False),)),
        (aten.copy_.default, ((0, "self", True),)),
        (aten.mm.out, ((None, "out", True),)),
        (aten.native_layer_norm.out, ((None, "out0", True), (None, "out1", True), (None, "out2", True))),
        (aten.index_put_.default, ((0, "self", False),)),
        (aten._foreach_add_.List, ((0, "self", False),)),
        (aten.split_with_sizes_copy.out, ((None, "out", True),)),
        (aten.normal_.default, ((0, "self", True),)),
    ],
)
def test_writes(operator: Any, writes: Any) -> None:
    assert facts_of(operator).writes == writes


@pytest.mark.parametrize("operator", [aten.t_.default, aten.squeeze_.default, aten.transpose_.default])
def test_metadata_writes_are_views_and_no_versions(operator: Any) -> None:
    assert facts_of(operator).is_view
    assert facts_of(operator).writes == ()


@pytest.mark.parametrize(
    "operator",
    [
        aten.view.default, aten.t.default, aten.select.int, aten.split.Tensor, aten.unbind.int, aten.expand.default,
        aten._unsafe_view.default, aten.detach.default, aten.as_strided.default, aten._conj.default, aten.alias.default,
    ],
)  # fmt: skip
def test_views_are_not_recorded(operator: Any) -> None:
    assert facts_of(operator).is_view
    assert facts_of(operator).unrecorded


def test_every_declared_write_is_a_write_a_view_or_a_resize() -> None:
    missed = []
    for name in dir(aten):
        packet = getattr(aten, name)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            continue
        for overload in packet.overloads():
            operator = getattr(packet, overload)
            arguments = operator._schema.arguments
            declared = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
            facts = facts_of(operator)
            known = [name for _, name, _ in facts.writes]
            if declared and known != declared and not (facts.is_view and not known):
                missed.append(str(operator))
            if declared and facts.is_view and Tag.inplace_view not in operator.tags and packet is not aten.set_:
                missed.append(str(operator))
    assert missed == []


@pytest.mark.parametrize("operator", [aten.resize_.default, aten.resize_as_.default])
def test_resizing_is_neither_view_nor_write(operator: Any) -> None:
    assert facts_of(operator).resizes
    assert facts_of(operator).unrecorded


def test_batch_norm_writes_statistics_only_in_training() -> None:
    x, mean, var = torch.zeros(4, 3), torch.zeros(3), torch.ones(3)
    facts = facts_of(aten.native_batch_norm.default)
    training = written_arguments(facts, (x, None, None, mean, var, True, 0.1, 1e-5), {})
    assert [(a is mean, a is var, only) for a, only in training] == [(True, False, False), (False, True, False)]
    assert written_arguments(facts, (x, None, None, mean, var, False, 0.1, 1e-5), {}) == []
    assert written_arguments(facts, (x, None, None, None, None, True, 0.1, 1e-5), {}) == []


def test_written_arguments_by_keyword_and_in_lists() -> None:
    a, b = torch.zeros(2, 2), torch.zeros(2, 2)
    assert written_arguments(facts_of(aten.mm.out), (a, a), {"out": b}) == [(b, True)]
    assert written_arguments(facts_of(aten._foreach_add_.List), ([a, b], [a, b]), {}) == [([a, b], False)]


def test_who_draws_and_whether_it_takes_a_generator() -> None:
    for operator, seeded, private in [
        (aten.native_dropout.default, True, False),
        (aten.bernoulli.p, True, True),
        (aten.rand_like.default, True, False),
        (aten.normal_.default, True, True),
        (aten.mm.default, False, False),
    ]:
        assert (facts_of(operator).seeded, facts_of(operator).private_generator) == (seeded, private), str(operator)


def test_collectives_are_recognised() -> None:
    for operator in (
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.wait_tensor.default,
        torch.ops.c10d.allreduce_.default,
    ):
        assert facts_of(operator).communicates
        assert facts_of(operator).unrecorded
    assert not facts_of(aten.mm.default).communicates


def test_allocations_without_content() -> None:
    assert facts_of(aten.empty.memory_format).empty
    assert facts_of(aten.new_empty.default).empty
    assert not facts_of(aten.zeros.default).empty


def test_facts_are_read_once() -> None:
    assert facts_of(aten.mm.default) is facts_of(aten.mm.default)
