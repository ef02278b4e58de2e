"""Where steps begin and end, and what kind they are."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from elbowroom.fitting.steps import Kind, Step, has_gradients, model_digest, signature_of


def test_signatures_tell_shapes_and_modes_apart_and_no_numbers() -> None:
    model = nn.Linear(4, 4)
    x = torch.zeros(2, 4)
    base = signature_of(model, (x,), {})
    assert signature_of(model, (torch.ones(2, 4),), {}) == base
    assert signature_of(model, (x, 3), {}) == signature_of(model, (x, 4), {})
    others = {
        signature_of(model, (torch.zeros(3, 4),), {}),
        signature_of(model, (x.double(),), {}),
        signature_of(model, (x,), {"mask": None}),
        signature_of(model, (x,), {"mode": "encode"}),
        signature_of(model, (x,), {"mode": "decode"}),
        signature_of(model, ([x, x],), {}),
        signature_of(model, (x.requires_grad_(),), {}),
    }
    with torch.autocast("cpu", torch.bfloat16):
        others.add(signature_of(model, (x.detach(),), {}))
    model.weight.requires_grad_(False)
    others.add(signature_of(model, (x.detach(),), {}))
    model.weight.requires_grad_(True)
    model.eval()
    others.add(signature_of(model, (x.detach(),), {}))
    assert len(others | {base}) == 11


def test_digests_tell_models_apart_and_not_their_contents() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    assert model_digest(one, {"": one}) == model_digest(other, {"": other})
    assert model_digest(one, {"": one}) != model_digest(nn.Linear(4, 5), {"": one})
    assert model_digest(one, {"": one}) != model_digest(one, {})


def test_a_step_is_over_when_backward_came_or_nobody_can_call_it() -> None:
    x = torch.ones(3, requires_grad=True)
    step = Step(gradients=False)
    out = x * 2
    step.watch_graph({"loss": [out]})
    assert not step.is_over
    heard = []
    step.when_backward_ends = lambda: heard.append(torch._C._current_graph_task_id() != -1)
    step.when_backward_is_gone = lambda: heard.append(torch._C._current_graph_task_id() == -1)
    out.sum().backward()
    assert heard == [True, True]
    assert step.is_over
    assert step.is_whole

    dropped = Step(gradients=False)
    out = x * 2
    dropped.watch_graph(out)
    assert not dropped.is_over
    del out
    assert dropped.is_over
    assert not dropped.is_whole


def test_a_backward_that_fails_is_told_from_one_that_ends() -> None:
    def fails(grad: torch.Tensor) -> None:
        raise ArithmeticError

    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(fails)
    out = y * 3
    step = Step(gradients=False)
    gone = []
    step.when_backward_is_gone = lambda: gone.append(1)
    step.watch_graph(out)
    with contextlib.suppress(ArithmeticError):
        out.sum().backward()
    assert gone == [1]
    assert step.is_over
    assert step.has_failed
    assert not step.is_whole


def test_kinds_begin_alike_or_not() -> None:
    kind = Kind(("a", "b"), gradients=True)
    assert kind.begins_like(("a",), gradients=True)
    assert kind.begins_like(("a", "b"), gradients=True)
    assert not kind.begins_like(("b",), gradients=True)
    assert not kind.begins_like(("a", "b", "c"), gradients=True)
    assert not kind.begins_like(("a",), gradients=False)


def test_gradients_are_there_or_not() -> None:
    model = nn.Linear(2, 2)
    assert not has_gradients(model)
    model.bias.grad = torch.zeros(2)
    assert has_gradients(model)
