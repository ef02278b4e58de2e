"""Arguments, outputs and errors of use, beyond cases 022-029, 080 and 083."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.conformance.equality import assert_same_bits, grads, plain, run_from_seed


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize(
    "extra",
    [
        3,
        2.5,
        None,
        "sum",
        True,
        1 + 2j,
        (1, 2),
        [3.0],
        {"a": 1},
        {1, 2},
        torch.float64,
        torch.Size([2]),
        slice(0, 2),
        object,
        len,
    ],
    ids=repr,
)
def test_kind_022_any_argument(contender: Any, extra: Any) -> None:
    """Arguments reach the function as the very objects they are."""
    x, seen = leaf(4), []
    for _ in range(2):
        contender.checkpoint(
            lambda t, e, *, k: (seen.extend([e, k]), t.sin().exp())[1], x, extra, k=extra
        ).sum().backward()
    assert all(e is extra for e in seen)


def test_kind_022_scalars_change_from_call_to_call(equal_to_plain: Any) -> None:
    """Python numbers are part of the call, not of the program: 1, True, 1.0, -0.0, inf and nan in turn."""

    def program(call: Any) -> Any:
        x, seen = torch.linspace(-1, 1, 7).requires_grad_(), []
        for scale in (1, True, 1.0, 0.0, -0.0, 2, float("inf"), 0.5, float("nan"), 3):
            y = call(lambda t, s: (t * s + s).tanh().exp().pow(2), x, scale)
            y.sum().backward()
            seen.append([y.detach(), x.grad])
            x.grad = None
        return seen

    equal_to_plain(program)


def test_kind_023_keywords_everywhere(equal_to_plain: Any) -> None:
    """Keyword-only, variadic and defaulted arguments; functools.partial, bound methods and callable objects."""

    class Scale:
        def __init__(self) -> None:
            self.w = leaf(4)

        def run(self, *tensors: torch.Tensor, power: int = 2, **named: torch.Tensor) -> torch.Tensor:
            return (sum(tensors) * self.w + sum(named.values())).sin().pow(power)

        def __call__(self, t: torch.Tensor) -> torch.Tensor:
            return self.run(t, t, extra=t.exp())

    def program(call: Any) -> Any:
        scale, x, z = Scale(), leaf(4), leaf(4)
        for _ in range(3):
            y = call(scale.run, x, z, power=3, args=z, kwargs=x)
            y = y + call(scale, x) + call(functools.partial(scale.run, power=1), z, a=x)
            y.sum().backward()
        return grads(scale.w, x, z)

    equal_to_plain(program)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    extra: dict[str, Any]


STRUCTURES = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b, [a]],
    "dict": lambda a, b: {"a": a, "b": (b, 3)},
    "ordered_dict": lambda a, b: collections.OrderedDict(z=a, a=b),
    "named_tuple": lambda a, b: Pair(a, Pair(b, "text")),
    "dataclass": lambda a, b: Result(a, {"b": b, "none": None}),
    "same_twice": lambda a, _b: (a, a),
    "view_and_base": lambda a, _b: (a, a[1:], a.view(2, 2)),
    "with_nones": lambda a, b: (None, a, None, b, "text", 7),
    "empty": lambda a, _b: (a, [], {}, torch.empty(0)),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_kind_024_025_output_structures(contender: Any, structure: str) -> None:
    """The structure comes back as it is, with its types and shared tensors, and gradients flow through each part."""

    def tensors(out: Any) -> list[torch.Tensor]:
        if torch.is_tensor(out):
            return [out]
        if dataclasses.is_dataclass(out):
            return tensors(vars(out))
        if isinstance(out, dict):
            return tensors(list(out.values()))
        return [t for part in out for t in tensors(part)] if isinstance(out, list | tuple) else []

    def program(call: Any) -> Any:
        x, seen = leaf(4), []
        for _ in range(3):
            out = call(lambda t: STRUCTURES[structure](t.sin().exp(), t.cos().tanh()), x)
            found = tensors(out)
            seen.append([str(out), [t.requires_grad for t in found], [found[0] is t for t in found]])
            sum(t.pow(2).sum() for t in found).backward()
        return seen, grads(x)

    assert_same_bits(run_from_seed(program, plain), run_from_seed(program, contender.checkpoint))


def test_kind_024_generator_output(contender: Any) -> None:
    """A function that returns a generator returns it unstarted, whenever it is consumed."""
    x = leaf(3)
    made = list(contender.checkpoint(lambda t: (t.sin() * n for n in range(3)), x))
    sum(made).sum().backward()
    assert torch.equal(x.grad, torch.cos(x.detach()) * 3)


def test_kind_027_outputs_used_in_part(equal_to_plain: Any) -> None:
    """Only some outputs reach the loss, others from step to step; integer and detached ones among them."""

    def block(t: torch.Tensor) -> Any:
        h = t.sin()
        return h.exp(), h.detach(), h.argmax(), h > 0, h.tanh().cos(), t

    def program(call: Any) -> Any:
        seen = []
        for used in ((0,), (4,), (0, 4), (5,), (0, 4, 5)):
            x = leaf(4)
            out = call(block, x)
            sum(out[n].sum() for n in used).backward()
            seen.append([[t.requires_grad for t in out], [t.detach() for t in out], x.grad, out[5] is x])
        return seen

    equal_to_plain(program)


def test_kind_027_identity_and_constant_outputs(equal_to_plain: Any) -> None:
    def program(call: Any) -> Any:
        x, w = leaf(4), leaf(4)
        seen = []
        for fn in (
            lambda t: t,
            lambda t: w,
            lambda t: t.detach(),
            lambda t: torch.ones(4),
            lambda t: t.view(2, 2),
            lambda t: 3.0,
        ):
            out = call(fn, x)
            seen.append(out.requires_grad if torch.is_tensor(out) else out)
            if torch.is_tensor(out) and out.requires_grad:
                out.exp().sum().backward()
        return seen, grads(x, w)

    equal_to_plain(program)


def test_kind_028_frozen_parts(equal_to_plain: Any) -> None:
    """Frozen inputs, frozen layers between trainable ones, and low-rank adapters that start at zero."""

    def program(call: Any) -> Any:
        base = nn.Linear(6, 6).requires_grad_(False)
        down, up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        nn.init.zeros_(up.weight)
        optimizer = torch.optim.SGD([down.weight, up.weight], lr=0.5)
        seen = []
        for _ in range(4):
            x = torch.randn(5, 6)
            y = call(lambda t: torch.tanh(base(t) + up(down(t))), x)
            y = call(lambda t: torch.tanh(base(t) + up(down(t))), y)
            y.pow(2).sum().backward()
            seen.append([y.requires_grad, y.detach(), grads(base, down, up)])
            optimizer.step()
            optimizer.zero_grad()
        return seen

    equal_to_plain(program)


def test_kind_029_nothing_to_save(contender: Any) -> None:
    """No gradient anywhere, or nothing worth saving: the output is what a plain call gives, and runs once."""
    runs = []

    def tower(t: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return t.sin().exp()

    frozen = contender.checkpoint(tower, torch.ones(3))
    assert not frozen.requires_grad
    assert frozen.grad_fn is None
    x = leaf(3)
    contender.checkpoint(lambda t: t + 1, x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))
    assert len(runs) == 1


@pytest.mark.parametrize("wrong", [torch.ones(2), 3, "relu", [nn.ReLU()]], ids=lambda w: type(w).__name__)
def test_kind_080_not_callable(contender: Any, wrong: Any) -> None:
    with pytest.raises(TypeError, match="callable"):
        contender.checkpoint(wrong)
    with pytest.raises(TypeError, match="callable"):
        contender.checkpoint(wrong, torch.ones(2))


def test_kind_080_not_a_module(contender: Any, elbowroom_only: None) -> None:
    with pytest.raises((TypeError, ValueError), match=r"[Mm]odule"):
        contender.wrap(lambda t: t)


@pytest.mark.parametrize(
    "option", ["use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop", "context_fn"]
)
def test_kind_083_torch_options_are_accepted(contender: Any, elbowroom_only: None, option: str) -> None:
    """A drop-in: torch's own keywords are taken, unless the function has a keyword of that name."""
    if not contender.takes_torch_options:
        pytest.skip("a wrapped module is called with its own keywords only")
    x = leaf(4)
    value: Any = {"context_fn": None, "determinism_check": "none"}.get(option, False)
    contender.checkpoint(lambda t: t.sin().exp(), x, **{option: value}).sum().backward()
    expected, x.grad = x.grad, None
    x.sin().exp().sum().backward()
    assert torch.equal(expected, x.grad)
    seen: list[Any] = []
    fn = {
        "use_reentrant": lambda t, use_reentrant: seen.append(use_reentrant),
        "preserve_rng_state": lambda t, preserve_rng_state: seen.append(preserve_rng_state),
        "determinism_check": lambda t, determinism_check: seen.append(determinism_check),
        "debug": lambda t, debug: seen.append(debug),
        "early_stop": lambda t, early_stop: seen.append(early_stop),
        "context_fn": lambda t, context_fn: seen.append(context_fn),
    }[option]
    contender.checkpoint(fn, x, **{option: "mine"})
    assert seen == ["mine"]


def test_kind_083_unknown_keyword_is_the_functions_error(contender: Any) -> None:
    with pytest.raises(TypeError, match="surprise"):
        contender.checkpoint(lambda t: t, leaf(2), surprise=1)
