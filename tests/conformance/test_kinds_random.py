"""Random numbers, beyond cases 001-006: other operators, other streams, saved noise."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conformance.equality import grads, training


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def square_attention(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q.sin(), q.cos(), dropout_p=0.25)


DRAWS = {
    "alpha_dropout": lambda t: F.alpha_dropout(t, 0.4, training=True).sin(),
    "feature_dropout": lambda t: F.dropout2d(t.view(2, 3, 2, 2), 0.5).exp().flatten(),
    "feature_alpha_dropout": lambda t: F.feature_alpha_dropout(t.view(2, 3, 2, 2), 0.5, training=True).exp().flatten(),
    "dropout_in_place": lambda t: F.dropout(t * 2, 0.5, inplace=True).sin(),
    "bernoulli": lambda t: (t * torch.bernoulli(t.detach().sigmoid())).tanh(),
    "bernoulli_": lambda t: (t * torch.empty_like(t).bernoulli_(0.3)).tanh(),
    "normal": lambda t: (t + torch.normal(0.0, t.detach().abs())).sin(),
    "exponential_": lambda t: (t * torch.empty_like(t).exponential_()).sin(),
    "randn_like": lambda t: (t * torch.randn_like(t)).exp().tanh(),
    "randint": lambda t: (t * torch.randint(0, 5, t.shape)).sin(),
    "randperm": lambda t: t.sin()[torch.randperm(t.numel())].exp(),
    "multinomial": lambda t: t.exp()[torch.multinomial(t.detach().softmax(0), 5)].sin(),
    "poisson": lambda t: (t * torch.poisson(t.detach().exp())).tanh(),
    "gumbel_softmax": lambda t: F.gumbel_softmax(t.view(4, 6), hard=True).cumsum(0).sin(),
    "rsample": lambda t: torch.distributions.Normal(t, t.detach().abs() + 1).rsample().sin(),
    "gamma": lambda t: torch.distributions.Gamma(t.exp(), 1.0 + t.abs()).rsample().sin(),
    "dirichlet": lambda t: torch.distributions.Dirichlet(t.exp() + 0.1).rsample().log(),
    "sdpa_dropout": lambda t: square_attention(t.view(1, 2, 3, 4)).exp(),
    "rrelu_in_place": lambda t: F.rrelu_(t * 2, 0.2, 0.7, training=True).sin(),
    "fractional_max_pool": lambda t: F.fractional_max_pool2d(t.view(1, 1, 4, 6).sin(), 2, output_size=2).exp(),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_kind_001_random_operators(equal_to_plain: Any, draw: str) -> None:
    """Masks, noise and samples of every family: same values, same gradients, in each of three steps."""
    equal_to_plain(training(lambda: lambda t: DRAWS[draw](t), lambda: [leaf(24)]))


def test_kind_001_dropout_between_lstm_layers(equal_to_plain: Any) -> None:
    lstm = lambda: nn.LSTM(4, 5, num_layers=3, dropout=0.5)  # noqa: E731
    equal_to_plain(training(lstm, lambda: [leaf(6, 2, 4)]))


def test_kind_001_bf16_and_double_dropout(equal_to_plain: Any) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        make = lambda dtype=dtype: [torch.randn(4, 8).to(dtype).requires_grad_()]  # noqa: E731
        equal_to_plain(training(lambda: lambda t: F.dropout(t.exp(), 0.5).tanh(), make))


def test_kind_002_stream_position_between_regions(equal_to_plain: Any) -> None:
    """Draws outside, between and after regions; the backward of one region runs before the forward of the next."""

    def program(call: Any) -> Any:
        x = leaf(16)
        seen = []
        for p in (0.1, 0.5):
            a = call(lambda t, p=p: F.dropout(t.sin(), p), x)
            seen.append(torch.rand(3))
            b = call(lambda t, p=p: F.dropout(t.exp(), p), a)
            seen.append(torch.randperm(5))
            b.sum().backward()
            seen.append(torch.rand(3))
        return seen, grads(x)

    equal_to_plain(program)


@pytest.mark.parametrize("shared", [True, False])
def test_kind_002_own_generator(equal_to_plain: Any, shared: bool) -> None:
    """A generator of the user's: drawn from once in the region, and left where the plain run leaves it."""

    def program(call: Any) -> Any:
        generators = [torch.Generator().manual_seed(5) for _ in range(2)]
        x = leaf(12)

        def noisy(t: torch.Tensor, g: torch.Generator) -> torch.Tensor:
            return (t.sin() * torch.rand(12, generator=g)).exp() * torch.empty(12).normal_(generator=g)

        y = call(noisy, call(noisy, x, generators[0]), generators[0 if shared else 1])
        between = torch.rand(2, generator=generators[0])
        y.sum().backward()
        return [y.detach(), between, grads(x), [g.get_state() for g in generators]]

    equal_to_plain(program)


def test_kind_002_seed_set_inside(equal_to_plain: Any) -> None:
    """A region that seeds the global stream, as tests and samplers do."""

    def block(t: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(11)
        return F.dropout(t.exp(), 0.5).sin()

    equal_to_plain(training(lambda: block, lambda: [leaf(20)]))


def test_kind_002_fork_rng_inside(equal_to_plain: Any) -> None:
    def block(t: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            t = F.dropout(t.sin(), 0.5)
        return F.dropout(t.exp(), 0.5).tanh()

    equal_to_plain(training(lambda: block, lambda: [leaf(20)]))


def test_kind_003_python_random_decides_the_order(equal_to_plain: Any) -> None:
    """random.shuffle, random.sample and a private random.Random: another path in every call."""

    def program(call: Any) -> Any:
        layers = [nn.Linear(6, 6) for _ in range(4)]
        private = random.Random(8)
        x = leaf(3, 6)

        def block(t: torch.Tensor) -> torch.Tensor:
            order = list(layers)
            random.shuffle(order)
            for layer in random.sample(order, 3):
                if private.random() > 0.3:
                    t = t + torch.tanh(layer(t))
            return t

        for _ in range(5):
            call(block, x).pow(2).sum().backward()
        return grads(x, *layers), private.getstate()

    equal_to_plain(program, runs=3)


def test_kind_004_numpy_generator(equal_to_plain: Any) -> None:
    """numpy's own generators and permutations, shared between two regions."""

    def program(call: Any) -> Any:
        generator = np.random.default_rng(3)
        x = leaf(8)

        def block(t: torch.Tensor) -> torch.Tensor:
            noise = torch.as_tensor(generator.standard_normal(8), dtype=torch.float32)
            order = torch.from_numpy(np.random.permutation(8))
            return (t * noise).sin()[order].exp()

        for _ in range(3):
            call(block, call(block, x)).sum().backward()
        return grads(x), generator.bit_generator.state

    equal_to_plain(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_kind_006_rrelu_dtypes_and_neighbours(equal_to_plain: Any, dtype: torch.dtype) -> None:
    """Noise that is saved before it is filled, twice in one region, next to values that are replayed."""

    def block(t: torch.Tensor) -> torch.Tensor:
        t = F.rrelu(t * 2, 0.1, 0.9, training=True)
        return F.rrelu(t.sin() * 3, 0.1, 0.9, training=True).cos()

    def program(call: Any) -> Any:
        seen = []
        for _ in range(3):
            x = torch.randn(30, 20).to(dtype).requires_grad_()
            y = call(block, x)
            junk = [torch.full_like(x, 7.0) for _ in range(32)]  # so that freed memory is not the old noise
            del junk
            y.pow(2).sum().backward()
            seen.append([y.detach(), x.grad])
        return seen

    equal_to_plain(program)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: its generator and fused dropout")
def test_kind_001_cuda_dropout(equal_to_plain: Any) -> None:
    def program(call: Any) -> Any:
        x = torch.randn(64, 64, device="cuda", requires_grad=True)
        seen = []
        for _ in range(3):
            y = call(lambda t: F.dropout(t.exp().tanh(), 0.5) * torch.rand(64, device="cuda"), x)
            y.sum().backward()
            seen.append(torch.rand(4, device="cuda"))
        return [t.cpu() for t in [*seen, x.grad]], torch.cuda.get_rng_state()

    equal_to_plain(program)
