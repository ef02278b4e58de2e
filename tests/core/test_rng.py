"""Generators: which ones an operator draws from, and that replays leave all of them as they were."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import elbowroom
from elbowroom.core.operators import facts_of
from elbowroom.core.rng import drawing_from, generators_of, remember
from tests.conformance.equality import assert_same_bits
from tests.core.counting import assert_equal_to_plain, fresh, gradients, plain

aten = torch.ops.aten


def test_the_generators_of_a_call() -> None:
    own = torch.Generator()
    x = torch.zeros(2)
    assert generators_of((x,), {}) == [torch.default_generator]
    assert generators_of((x,), {"generator": own}) == [own]
    assert generators_of((x, own), {}) == [own]
    assert generators_of((2,), {"device": torch.device("cpu")}) == [torch.default_generator]


def test_a_private_generator_where_the_schema_takes_one() -> None:
    x = torch.empty(5)
    states = remember((x,), {})
    first = x.normal_().clone()
    after = torch.get_rng_state()
    facts = facts_of(aten.normal_.default)
    with drawing_from(states, facts, {}) as kwargs:
        assert kwargs["generator"] is not torch.default_generator
        assert torch.equal(torch.get_rng_state(), after), "nobody else sees the default generator move"
        assert torch.equal(torch.empty(5).normal_(**kwargs), first)
    assert torch.equal(torch.get_rng_state(), after)


def test_elsewhere_the_default_is_set_and_put_back() -> None:
    x = torch.ones(50)
    states = remember((x,), {})
    first = aten.native_dropout.default(x, 0.5, True)[0]
    after = torch.get_rng_state()
    with drawing_from(states, facts_of(aten.native_dropout.default), {}) as kwargs:
        assert torch.equal(aten.native_dropout.default(x, 0.5, True, **kwargs)[0], first)
    assert torch.equal(torch.get_rng_state(), after)


def test_the_state_is_put_back_after_an_error() -> None:
    states = remember((torch.ones(2),), {})
    torch.rand(3)
    after = torch.get_rng_state()
    with pytest.raises(ValueError, match="inside"), drawing_from(states, facts_of(aten.native_dropout.default), {}):
        raise ValueError("inside")
    assert torch.equal(torch.get_rng_state(), after)


def test_nothing_remembered_nothing_touched() -> None:
    before = torch.get_rng_state()
    with drawing_from((), facts_of(aten.mm.default), {"a": 1}) as kwargs:
        assert kwargs == {"a": 1}
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, g: F.dropout(x, 0.4),
        lambda x, g: F.alpha_dropout(x, 0.4),
        lambda x, g: F.rrelu(x, training=True),
        lambda x, g: x * torch.rand_like(x),
        lambda x, g: x * torch.randn(x.shape),
        lambda x, g: x + torch.bernoulli(torch.full_like(x, 0.5)),
        lambda x, g: x[torch.randperm(x.shape[0])],
        lambda x, g: x * torch.empty_like(x).exponential_(),
        lambda x, g: x[torch.multinomial(x.detach().abs(), 3)],
        lambda x, g: x * torch.rand(x.shape, generator=g),
        lambda x, g: x + torch.empty_like(x).uniform_(generator=g),
        lambda x, g: x * torch.normal(0.0, 1.0, x.shape, generator=g),
        lambda x, g: F.gumbel_softmax(x),
    ],
)
@pytest.mark.parametrize("verify", ["first", "never"])
def test_draws_are_those_of_plain_calls(draw: Any, verify: str) -> None:
    fn = fresh(lambda x, g: draw(draw(x * 2, g).sin() * 3, g).exp())
    x = torch.randn(7, requires_grad=True)
    runs = []
    for call in (plain, elbowroom.checkpoint):
        own = torch.Generator()
        own.manual_seed(5)
        torch.manual_seed(0)
        run: list[Any] = []
        for _ in range(4):
            run += [gradients(call, fn, x, own, **({} if call is plain else {"verify": verify})), own.get_state()]
        runs.append([*run, torch.get_rng_state()])
    assert_same_bits(runs[0], runs[1])


def test_a_new_generator_at_every_call() -> None:
    fn = fresh(lambda x, seed: (x * torch.rand(4, generator=torch.Generator().manual_seed(seed))).sin())
    x = torch.randn(4, requires_grad=True)
    for seed in (1, 2, 3, 3, 1):
        assert_equal_to_plain(fn, x, seed, calls=1)


def test_states_are_released_with_the_operators_they_belong_to() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        F.dropout(x, 0.3)  # nothing reads it
        return F.dropout(x, 0.5).sin()

    from tests.core.counting import programs_of, tape_of

    fn = fresh(body)
    out = elbowroom.checkpoint(fn, torch.randn(4, requires_grad=True))
    tape = tape_of(programs_of(fn)[0])
    assert len(tape.rng) == 1
    out.sum().backward()
    assert tape.rng == {}


def test_other_threads_streams_do_not_repeat_while_one_replays() -> None:
    fn = fresh(lambda x: (x * torch.empty(64).uniform_()).sin().exp())  # takes a generator: a private one
    x = torch.randn(64, requires_grad=True)
    seen: list[float] = []
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            seen.append(float(torch.rand((), dtype=torch.float64)))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(60):
            elbowroom.checkpoint(fn, x, verify="never").sum().backward()
    finally:
        stop.set()
        thread.join()
    assert len(seen) > 10
    assert len(set(seen)) == len(seen)
