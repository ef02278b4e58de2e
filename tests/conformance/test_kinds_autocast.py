"""Autocast, dtypes, devices and modes around a region, beyond cases 008, 009, 048, 049 and 051."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conformance.equality import grads, training


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def mlp(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_kind_008_autocast_dtypes(equal_to_plain: Any, dtype: torch.dtype, backward_inside: bool) -> None:
    """Regions under autocast, backward outside it or (as many do by mistake) inside it."""

    def program(call: Any) -> Any:
        module, x, seen = mlp(), leaf(4, 8), []
        for _ in range(3):
            with torch.autocast("cpu", dtype=dtype):
                y = call(module, call(module, x))
                loss = y.float().pow(2).mean()
                if backward_inside:
                    loss.backward()
            if not backward_inside:
                loss.backward()
            seen.append(y.detach())
        return seen, grads(x, module)

    equal_to_plain(program)


def test_kind_008_other_autocast_around_backward(equal_to_plain: Any) -> None:
    """bf16 in the forward, fp16 autocast around backward: element sizes agree, so nothing would crash."""

    def program(call: Any) -> Any:
        module, x = mlp(), leaf(4, 8)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = call(module, x)
            with torch.autocast("cpu", dtype=torch.float16):
                y.float().pow(2).mean().backward()
        return grads(x, module)

    equal_to_plain(program)


def test_kind_008_custom_fwd_function(equal_to_plain: Any) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            a, b = ctx.saved_tensors
            return g @ b.t(), a.t() @ g

    def program(call: Any) -> Any:
        w, x = leaf(8, 8), leaf(4, 8)
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = call(lambda t: Scaled.apply(t @ w, w).relu().exp(), x)
            y.float().sum().backward()
        return grads(w, x)

    equal_to_plain(program)


@pytest.mark.parametrize("cache", [True, False])
def test_kind_009_one_weight_in_and_outside_regions(equal_to_plain: Any, cache: bool) -> None:
    """The cast of a weight is shared by a region, its neighbour and code outside, with and without autocast's cache."""

    def program(call: Any) -> Any:
        module, x = nn.Linear(16, 16), leaf(8, 16)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
                y = call(lambda t: module(t).relu(), x)
                y = module(y)
                y = call(lambda t: module(t).tanh(), y)
                with torch.no_grad():
                    extra = call(module, x)
                y = y + extra
            y.float().pow(2).mean().backward()
        return grads(x, module)

    equal_to_plain(program)


def test_kind_048_modes_around_forward_only(equal_to_plain: Any) -> None:
    """A function mode that changes results, active in the forward but not in backward, and the other way round."""

    class Double(TorchFunctionMode):
        def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = fn(*args, **(kwargs or {}))
            return out * 2 if fn in (torch.sin, torch.Tensor.exp) else out

    def program(call: Any) -> Any:
        x = leaf(6)
        block = lambda t: torch.sin(t).exp().tanh()  # noqa: E731
        for forward_mode, backward_mode in ((Double, contextlib.nullcontext), (contextlib.nullcontext, Double)):
            with forward_mode():
                y = call(block, x)
            with backward_mode():
                y.sum().backward()
        return [y.detach(), grads(x)]

    equal_to_plain(program)


def test_kind_048_dispatch_mode_around(equal_to_plain: Any) -> None:
    """An outer dispatch mode that changes a result: what the region gave is what its gradient belongs to."""

    class Shift(TorchDispatchMode):
        def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = fn(*args, **(kwargs or {}))
            return out + 1 if fn is torch.ops.aten.sin.default else out

    def program(call: Any) -> Any:
        x = leaf(6)
        for _ in range(3):
            with Shift():
                y = call(lambda t: t.sin().exp().tanh(), x)
            y.sum().backward()
        return [y.detach(), grads(x)]

    equal_to_plain(program)


def test_kind_048_mode_around_backward_sees_no_forward_operator(contender: Any) -> None:
    """Replay is hermetic: a dispatch mode around backward counts the same operators as without checkpointing."""

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.sines = 0

        def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.sines += fn is torch.ops.aten.sin.default
            return fn(*args, **(kwargs or {}))

    x = leaf(6)
    for _ in range(2):
        y = contender.checkpoint(lambda t: t.sin().exp().tanh(), x)
        with Count() as count:
            y.sum().backward()
        assert count.sines == 0


def test_kind_049_default_device_and_dtype(equal_to_plain: Any) -> None:
    """Default dtype and device changed between forward and backward."""

    def program(call: Any) -> Any:
        x = torch.randn(5, dtype=torch.float32, requires_grad=True)
        block = lambda t: (t + torch.arange(5.0) * torch.tensor(0.3) + torch.full((5,), 0.7)).sin().exp()  # noqa: E731
        for _ in range(3):
            y = call(block, x)
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            try:
                with torch.device("meta"):
                    y.sum().backward()
            finally:
                torch.set_default_dtype(before)
        return [y.detach(), grads(x)]

    equal_to_plain(program)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kind_049_cuda_default_device(equal_to_plain: Any) -> None:
    def program(call: Any) -> Any:
        with torch.device("cuda"):
            x = torch.linspace(0, 1, 5, requires_grad=True)
            y = call(lambda t: (t + torch.arange(5.0)).exp().tanh(), x)
        y.sum().backward()
        return [y.detach().cpu(), x.grad.cpu()]

    equal_to_plain(program)


def test_kind_051_grad_modes_inside(equal_to_plain: Any) -> None:
    """no_grad, enable_grad, set_grad_enabled and inference_mode parts inside a region; what the code sees of them."""

    def program(call: Any) -> Any:
        module, x, seen = mlp(), leaf(4, 8), []

        def block(t: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_grad_enabled())
            with torch.no_grad():
                target = module(t).softmax(-1)
                with torch.enable_grad():
                    inner = module(t)
                    seen.append(inner.requires_grad)
            with torch.inference_mode():
                scale = float(t.abs().max()) + 1.0
            with torch.set_grad_enabled(False):
                frozen = module[0].weight.norm()
            return F.mse_loss(module(t), target) * scale + inner.sin().sum() / frozen

        for _ in range(3):
            call(block, x).backward()
        return seen, grads(x, module)

    equal_to_plain(program)


def test_kind_051_no_grad_around_region(contender: Any) -> None:
    """With gradients off a region is a plain call, and its output has no graph."""
    module = mlp()
    x = leaf(4, 8)
    with torch.no_grad():
        out = contender.checkpoint(module, x)
        assert not out.requires_grad
        assert torch.equal(out, module(x))
    with torch.inference_mode():
        assert contender.checkpoint(module, x).is_inference()


def test_kind_051_mixed_dtype_model(equal_to_plain: Any) -> None:
    """A model in bf16 with an fp32 norm, as large models are trained."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.inner = mlp().bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(self.norm(x.float()).bfloat16())

    equal_to_plain(training(Block, lambda: [torch.randn(3, 8).bfloat16().requires_grad_()]))
