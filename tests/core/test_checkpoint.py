"""The verbs: forms of ``checkpoint``, ``wrap`` and ``unwrap``, copies, and the texts of their errors."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import elbowroom
from elbowroom.errors import UsageError
from tests.core.counting import assert_equal_to_plain, drafted, fresh

# checkpoint ----------------------------------------------------------------------------------------------------------


def body(x: torch.Tensor, w: torch.Tensor | None = None, *, scale: float = 2.0) -> torch.Tensor:
    """A body with a documentation."""
    y = x if w is None else x @ w
    return (y * scale).sin()


def test_it_calls_with_arguments_and_keywords() -> None:
    x = torch.randn(3, 3, requires_grad=True)
    assert torch.equal(elbowroom.checkpoint(body, x), body(x))
    assert torch.equal(elbowroom.checkpoint(body, x, x, scale=3.0), body(x, x, scale=3.0))
    assert torch.equal(elbowroom.checkpoint(body, x, w=x), body(x, x))


@pytest.mark.parametrize(
    "decorate",
    [
        elbowroom.checkpoint,
        elbowroom.checkpoint(),
        elbowroom.checkpoint(keep="matmuls"),
        elbowroom.checkpoint(keep=None, verify="always"),
    ],
)
def test_it_decorates(decorate: Callable[[Any], Any]) -> None:
    fn = fresh(body)
    decorated = decorate(fn)
    assert (decorated.__name__, decorated.__doc__, decorated.__wrapped__) == ("body", body.__doc__, fn)
    assert inspect.signature(decorated) == inspect.signature(fn)
    x = torch.randn(3, 3, requires_grad=True)
    for _ in range(2):
        (out, grad), expected = _run(decorated, x), _run(fn, x)
        assert torch.equal(out, expected[0])
        assert torch.equal(grad, expected[1])
    assert elbowroom.proof(decorated).calls == elbowroom.proof(fn).calls == 2


def _run(fn: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = fn(x, scale=3.0)
    (grad,) = torch.autograd.grad(out.sum(), x)
    return out.detach(), grad


def test_a_function_without_needs_is_called_and_one_with_needs_is_decorated() -> None:
    w = torch.randn(3, requires_grad=True)
    out = elbowroom.checkpoint(lambda: (w * 2).sin())
    assert torch.equal(out, (w * 2).sin())
    assert callable(elbowroom.checkpoint(lambda x: x))
    assert torch.equal(elbowroom.checkpoint(functools.partial(body, w), use_reentrant=False), body(w))


def test_methods_static_methods_and_class_methods() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        @elbowroom.checkpoint
        def one(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sin()

        @elbowroom.checkpoint(keep="matmuls")
        def two(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
            return self.linear(x).exp() * scale

        @staticmethod
        @elbowroom.checkpoint
        def three(x: torch.Tensor) -> torch.Tensor:
            return (x * 2).cos()

        @classmethod
        @elbowroom.checkpoint
        def four(cls, x: torch.Tensor) -> torch.Tensor:
            return (x * 3).cos()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) + self.two(x, scale=2.0) + self.three(x) + self.four(x)

    model = Model()
    x = torch.randn(2, 3, requires_grad=True)
    for _ in range(3):
        model(x).sum().backward()
    assert [elbowroom.proof(f).calls for f in (model.one, Model.two, Model.three, model.four)] == [3, 3, 3, 3]
    assert_equal_to_plain(model.one, x)


@pytest.mark.parametrize("use", ["bound method", "module", "partial", "object", "nested function"])
def test_any_callable(use: str) -> None:
    class Thing:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).sin()

        def method(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).sin()

    thing = Thing()
    fn = {
        "bound method": thing.method,
        "module": nn.Sequential(nn.Linear(3, 3), nn.GELU()),
        "partial": functools.partial(functools.partial(fresh(body), scale=1.0), scale=3.0),
        "object": thing,
        "nested function": fresh(lambda x: (x * 2).sin()),
    }[use]
    assert_equal_to_plain(fn, torch.randn(2, 3, requires_grad=True))
    assert elbowroom.proof(fn).calls == 4


def test_lambdas_in_a_loop_share_their_programs() -> None:
    layers = [nn.Linear(3, 3) for _ in range(6)]
    fns = [lambda x, layer=layer: layer(x).sin() for layer in layers]
    h = torch.randn(2, 3, requires_grad=True)
    for fn in fns:
        h = elbowroom.checkpoint(fn, h)
    h.sum().backward()
    assert (elbowroom.proof(fns[0]).calls, elbowroom.proof(fns[0]).programs) == (6, 1)


def test_moot_keywords_of_torch_are_ignored() -> None:
    x = torch.randn(3, requires_grad=True)
    out = elbowroom.checkpoint(
        fresh(body), x, use_reentrant=True, preserve_rng_state=False, context_fn=None, determinism_check="none",
        debug=True, early_stop=False, scale=3.0,
    )  # fmt: skip
    assert torch.equal(out, body(x, scale=3.0))


def test_a_function_with_such_a_keyword_gets_it() -> None:
    seen = []

    def own(x: torch.Tensor, debug: bool = False) -> torch.Tensor:
        seen.append(debug)
        return (x * 2).sin()

    elbowroom.checkpoint(own, torch.randn(3, requires_grad=True), debug=True, use_reentrant=False)
    assert seen == [True]


@pytest.mark.parametrize("wrong", [3, None, torch.zeros(2), "f"])
def test_not_callable(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"checkpoint\(fn, .*needs a callable first, got (int|NoneType|Tensor|str)"):
        elbowroom.checkpoint(wrong, torch.zeros(2))


def test_an_unknown_keyword_is_the_functions_own_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'sacle'"):
        elbowroom.checkpoint(body, torch.randn(2, requires_grad=True), sacle=3)


@pytest.mark.parametrize("verify", ["sometimes", "", None])
def test_verify_is_one_of_three(verify: Any) -> None:
    with pytest.raises(UsageError, match=r"verify=.*: it is one of 'first', 'always', 'never'"):
        elbowroom.checkpoint(body, torch.zeros(2), verify=verify)
    with pytest.raises(UsageError, match="it is one of"):
        elbowroom.wrap(nn.Linear(2, 2), verify=verify)


def test_exceptions_pass_unchanged() -> None:
    class OwnError(Exception):
        pass

    error = OwnError("mine")

    def failing(x: torch.Tensor, fail: bool) -> torch.Tensor:
        h = (x * 2).sin()
        if fail:
            raise error
        return h.exp()

    fn = fresh(failing)
    x = torch.randn(3, requires_grad=True)
    for fail in (False, True, False, True, False):
        if fail:
            with pytest.raises(OwnError) as caught:
                elbowroom.checkpoint(fn, x, fail)
            assert caught.value is error
        else:
            assert_equal_to_plain(fn, x, fail, calls=1)


# wrap ----------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return F.gelu(self.linear(x) * scale)


def test_wrap_gives_the_same_object() -> None:
    block = Block()
    names, state = [n for n, _ in block.named_modules()], dict(block.state_dict())
    assert elbowroom.wrap(block) is block
    assert isinstance(block, Block)
    assert (type(block).__name__, type(block).__qualname__, type(block).__doc__) == ("Block", "Block", "A block.")
    assert [n for n, _ in block.named_modules()] == names
    assert dict(block.state_dict()).keys() == state.keys()
    assert repr(block) == repr(Block())
    assert inspect.signature(block.forward) == inspect.signature(Block().forward)


def test_unwrap_leaves_no_trace() -> None:
    block = Block()
    before = dict(block.__dict__)
    assert elbowroom.unwrap(elbowroom.wrap(block)) is block
    assert type(block) is Block
    assert block.__dict__ == before
    assert elbowroom.unwrap(block) is block


def test_a_wrapped_module_checkpoints_itself_and_hooks_run_outside() -> None:
    block = elbowroom.wrap(Block())
    seen: list[str] = []
    block.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    block.register_forward_hook(lambda m, args, out: seen.append("post"))
    x = torch.randn(2, 4, requires_grad=True)
    for call in range(3):
        plain_block = elbowroom.unwrap(copy.deepcopy(block))
        block.zero_grad()
        block(x, scale=2.0).sum().backward()
        plain_block(x, scale=2.0).sum().backward()
        assert torch.equal(block.linear.weight.grad, plain_block.linear.weight.grad)  # type: ignore[arg-type]
        assert elbowroom.proof(block).calls == call + 1
    assert seen == ["pre", "post"] * 6


def test_wrapping_again_replaces_the_settings() -> None:
    block = elbowroom.wrap(elbowroom.wrap(Block()), keep="matmuls")
    block(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert elbowroom.proof(block).replays == 1  # the scaling, and not the product
    assert type(elbowroom.unwrap(block)) is Block


def test_checkpointing_a_wrapped_module_is_one_region() -> None:
    block = elbowroom.wrap(Block())
    x = torch.randn(2, 4, requires_grad=True)
    elbowroom.checkpoint(block, x).sum().backward()
    assert (elbowroom.proof(block).regions, elbowroom.proof(block).calls) == (1, 1)


def test_wrap_takes_modules_only() -> None:
    with pytest.raises(TypeError, match=r"needs an nn.Module, got function; for a function use checkpoint\(fn, ...\)"):
        elbowroom.wrap(body)  # type: ignore[type-var]


def test_a_forward_set_on_the_instance() -> None:
    def forward(self: Block, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin()

    block = Block()
    block.forward = types.MethodType(forward, block)  # type: ignore[method-assign]
    elbowroom.wrap(block)
    x = torch.randn(2, 4, requires_grad=True)
    assert torch.equal(block(x), block.linear(x).sin())
    assert elbowroom.proof(block).calls == 1

    twin = copy.deepcopy(block)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert torch.equal(twin(x), torch.zeros(2, 4)), "the copy runs on its own parameters"
    elbowroom.unwrap(block)
    assert torch.equal(block(x), block.linear(x).sin())


def test_a_class_patched_later_is_respected() -> None:
    class Patched(Block):
        pass

    first = elbowroom.wrap(Patched())
    x = torch.randn(2, 4, requires_grad=True)
    first(x)
    Patched.forward = lambda self, x: self.linear(x).cos()  # type: ignore[method-assign]
    second = elbowroom.wrap(Patched())
    for block in (first, second):
        assert torch.equal(block(x), block.linear(x).cos())


@pytest.mark.parametrize("keep", [None, "matmuls", ["label"], [torch.ops.aten.mm, torch.ops.aten.addmm.default]])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_wrapped_and_separate(way: str, keep: Any) -> None:
    block = elbowroom.wrap(nn.Sequential(Block(), nn.GELU()), keep=keep)
    x = torch.randn(2, 4, requires_grad=True)
    block(x)
    if way == "deepcopy":
        twin = copy.deepcopy(block)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(block))
    else:
        file = io.BytesIO()
        torch.save(block, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert torch.equal(twin(x), block(x))
    twin(x).sum().backward()
    assert twin[0].linear.weight.grad is not None
    assert block[0].linear.weight.grad is None
    assert (elbowroom.proof(block).calls, elbowroom.proof(twin).calls) == (2, 2)
    assert type(elbowroom.unwrap(twin)) is nn.Sequential
    assert type(block) is not nn.Sequential


def test_a_shallow_copy_counts_for_itself() -> None:
    class Own(Block):  # the class has no programs of other tests
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sin()

    block = elbowroom.wrap(Own())
    twin = copy.copy(block)
    x = torch.randn(2, 4, requires_grad=True)
    counts = []
    for _ in range(4):
        with drafted() as seen:
            block(x).sum().backward()
            twin(x).sum().backward()
        counts.append(len(seen))
    assert counts[0] > 0
    assert counts[2] == 0, "neither is recorded anew because the other ran"
    assert (elbowroom.proof(block).calls, elbowroom.proof(twin).calls) == (4, 4)


def test_a_traced_module_can_be_wrapped_and_copied() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    elbowroom.wrap(traced)
    x = torch.randn(2, 4, requires_grad=True)
    expected = traced(x)
    assert elbowroom.proof(traced).calls == 1
    for twin in (copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        assert torch.equal(twin(x), expected)
    elbowroom.unwrap(traced)
    assert torch.equal(traced(x), expected)


def test_containers_stay_containers() -> None:
    layers = elbowroom.wrap(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)))
    assert len(layers) == 3
    assert isinstance(layers[0], nn.Linear)
    assert [type(m).__name__ for m in layers] == ["Linear", "GELU", "Linear"]
    assert torch.equal(layers(torch.ones(1, 4)), layers[2](layers[1](layers[0](torch.ones(1, 4)))))


def test_no_grad_and_inference_are_plain_calls() -> None:
    fn = fresh(body)
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        elbowroom.checkpoint(fn, x)
    with torch.inference_mode():
        elbowroom.checkpoint(fn, x)
    assert elbowroom.proof(fn).calls == 0
