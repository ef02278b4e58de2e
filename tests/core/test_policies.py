"""Policies: what they keep, and what they say when they cannot be understood."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import elbowroom
from elbowroom.core.policies import Candidate, attention, everything, key_of, matmuls, nothing, policy_of
from elbowroom.errors import UsageError
from tests.core.counting import assert_equal_to_plain, fresh, programs_of

aten = torch.ops.aten


def candidate(operator: Any, label: str | None = None) -> Candidate:
    return Candidate(operator, 64, (4, 4), torch.float32, label, "block", "model.py:3 in forward")


@pytest.mark.parametrize(
    ("keep", "kept", "dropped"),
    [
        (None, [], [aten.mm.default, aten.sin.default]),
        ("nothing", [], [aten.mm.default]),
        ("everything", [aten.mm.default, aten.sin.default], []),
        ("matmuls", [aten.mm.default, aten.addmm.default, aten.bmm.default], [aten.sin.default, aten.add.Tensor]),
        ("attention", [aten._scaled_dot_product_flash_attention_for_cpu.default], [aten.mm.default]),
        (aten.sin, [aten.sin.default, aten.sin.out], [aten.cos.default]),
        (aten.sin.default, [aten.sin.default], [aten.sin.out]),
        ([aten.mm, aten.sin.default], [aten.mm.default, aten.sin.default], [aten.cos.default]),
        ((aten.mm,), [aten.mm.default], [aten.sin.default]),
        (lambda v: v.nbytes == 64, [aten.cos.default], []),
    ],
)
def test_what_a_policy_keeps(keep: Any, kept: list[Any], dropped: list[Any]) -> None:
    policy = policy_of(keep)
    assert [policy(candidate(operator)) for operator in kept] == [True] * len(kept)
    assert [policy(candidate(operator)) for operator in dropped] == [False] * len(dropped)


def test_ready_policies_have_names() -> None:
    named = {"nothing": nothing, "everything": everything, "matmuls": matmuls, "attention": attention}
    assert {name: policy_of(name) for name in named} == named
    assert elbowroom.policies.matmuls is matmuls


def test_labels() -> None:
    policy = policy_of(["qkv"])
    assert policy(candidate(aten.mm.default, "qkv"))
    assert not policy(candidate(aten.mm.default, "other"))
    assert not policy(candidate(aten.mm.default))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("matmul", "keep='matmul' is no ready policy; there are attention, everything, matmuls, nothing. "
                   "For a label write keep=['matmul']."),
        (3, "keep must be a policy, its name, or a list of operators and labels; got int"),
        ([3], "keep has 3: its items are operators (torch.ops.aten.mm, torch.ops.aten.mm.default) or labels given with "
              "elbowroom.name(tensor, label)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("entry", ["checkpoint", "decorator", "wrap"])
def test_errors_are_told_where_the_setting_is_given(keep: Any, message: str, entry: str) -> None:
    enter = {
        "checkpoint": lambda: elbowroom.checkpoint(lambda x: x, torch.zeros(1), keep=keep),
        "decorator": lambda: elbowroom.checkpoint(keep=keep)(lambda x: x),
        "wrap": lambda: elbowroom.wrap(torch.nn.Linear(2, 2), keep=keep),
    }[entry]
    with pytest.raises(UsageError) as caught:
        enter()
    assert str(caught.value) == message


def test_equal_policies_share_a_key() -> None:
    assert key_of(None) == key_of("nothing") == key_of(nothing)
    assert key_of([aten.mm, "a"]) == key_of(["a", aten.mm]) == key_of(("a", aten.mm))
    assert key_of([aten.mm]) != key_of([aten.mm.default])


def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = elbowroom.name(x @ w, "scores")
    h = F.softmax(h * 2, -1)
    return (elbowroom.name(h.t(), "weights") @ w).sin()


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (None, []),
        ("matmuls", ["aten.mm.default", "aten.mm.default"]),
        (["scores"], ["aten.mm.default"]),
        (["weights"], ["aten._softmax.default"]),
        (["scores", "weights"], ["aten.mm.default", "aten._softmax.default"]),
        (["nobody"], []),
        ([aten._softmax, "scores"], ["aten.mm.default", "aten._softmax.default"]),
        (lambda v: v.label == "weights", ["aten._softmax.default"]),
    ],
)
def test_kept_values_of_a_region(keep: Any, kept: list[str]) -> None:
    fn = fresh(body)
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    assert_equal_to_plain(fn, x, w, keep=keep)
    (program,) = programs_of(fn)
    assert [str(program.ops[v.maker].func) for v in program.values if v.keep] == kept
    assert elbowroom.proof(fn).kept == (), "kept by the policy's wish only: nothing to report"


def test_what_is_kept_is_not_replayed() -> None:
    # mm, mul, softmax, mm, sin: sin needs the second product, mm needs the softmax, which needs mul and the first mm.
    for keep, replays in [(None, 4), ("matmuls", 2), (["weights"], 1), (["scores"], 3), (["scores", "weights"], 1)]:
        fn = fresh(body)
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        elbowroom.checkpoint(fn, x, w, keep=keep).sum().backward()
        assert elbowroom.proof(fn).replays == replays, keep


def test_a_candidate_says_what_and_where() -> None:
    seen: list[Candidate] = []

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return elbowroom.name(self.inner(x), "wide").sin()

    def watch(value: Candidate) -> bool:
        seen.append(value)
        return False

    elbowroom.wrap(Block(), keep=watch)(torch.randn(2, 4))
    first = seen[0]
    assert first[:4] == (aten.addmm.default, 2 * 8 * 4, (2, 8), torch.float32)
    assert (first.label, first.module) == (None, "inner")
    assert __file__ in first.line
    assert [v.label for v in seen if v.operator is aten.addmm.default] == [None, "wide"]
    assert next(v for v in seen if v.operator is aten.sin.default).module == "Block"


def test_a_policy_that_raises_is_the_users_error() -> None:
    def broken(value: Candidate) -> bool:
        raise KeyError("no such thing")

    with pytest.raises(Exception, match="no such thing") as caught:
        elbowroom.checkpoint(lambda x: (x * 2).sin(), torch.randn(3, requires_grad=True), keep=broken)
    assert isinstance(caught.value, KeyError | UsageError)


def test_a_policy_written_at_the_call_does_not_pile_up() -> None:
    import importlib

    regions = importlib.import_module("elbowroom.core.checkpoint")._regions
    fn = fresh(lambda x: (x * 2).sin())
    x = torch.randn(3, requires_grad=True)
    for _ in range(100):
        elbowroom.checkpoint(fn, x, keep=lambda v: False).sum().backward()
    assert len(regions[fn.__code__]) < 40


def test_keeping_everything_runs_no_recorder() -> None:
    fn = fresh(lambda x: (x * 2).sin())
    assert_equal_to_plain(fn, torch.randn(3, requires_grad=True), keep="everything")
    assert elbowroom.proof(fn).calls == 0


def test_a_label_is_a_string() -> None:
    with pytest.raises(UsageError, match=r"name\(tensor, label\): the label is a string, got int"):
        elbowroom.name(torch.zeros(1), 3)  # type: ignore[arg-type]
