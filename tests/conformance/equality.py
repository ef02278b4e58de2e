"""Bit for bit: comparing what a contender computed with what a plain call computes.

A *program* is a function ``program(call)`` that builds all it needs, runs regions through ``call(fn, *args)`` and
returns what is to be compared (tensors, numbers, nested lists and dicts of them). It runs once with a plain call and
once with the contender, from the same seeds of torch, numpy and ``random``; results and the three random streams must
agree.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

Program = Callable[[Callable[..., Any]], Any]


def plain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def seed_everything(seed: int = 0) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def random_streams() -> list[Any]:
    """Where the three global random streams are."""
    return [torch.get_rng_state(), np.random.get_state(), random.getstate()]


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype, layout, device and bits (any NaN equals any NaN)."""
    if (a.dtype, a.layout, a.device, a.is_nested) != (b.dtype, b.layout, b.device, b.is_nested):
        return False
    if a.is_nested:
        parts_a, parts_b = a.detach().unbind(), b.detach().unbind()
        return len(parts_a) == len(parts_b) and all(map(equal_bits, parts_a, parts_b))
    if a.shape != b.shape:
        return False
    if a.device.type == "meta" or a.numel() == 0:
        return True
    if a.is_quantized:
        return bool(torch.equal(a, b))
    flat_a, flat_b = _flat(a), _flat(b)
    if torch.equal(flat_a.view(torch.uint8), flat_b.view(torch.uint8)):
        return True
    if not flat_a.is_floating_point():
        return False
    there = ~flat_a.isnan()
    same_nan = torch.equal(there, ~flat_b.isnan())
    return same_nan and torch.equal(flat_a[there].view(torch.uint8), flat_b[there].view(torch.uint8))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in order, in memory of their own; complex numbers as two each, since NaN may sit in one of them."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device).copy_(tensor.reshape(-1))


def assert_same_bits(expected: Any, found: Any, where: str = "result") -> None:
    """AssertionError naming the place unless ``found`` has the types, shapes and bits of ``expected``."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), f"{where}: expected a tensor, found {type(found).__name__}"
        assert equal_bits(expected, found), f"{where}: {_difference(expected, found)}"
        return
    assert type(expected) is type(found), f"{where}: expected {type(expected).__name__}, found {type(found).__name__}"
    if isinstance(expected, np.ndarray):
        assert np.array_equal(expected, found), f"{where}: arrays differ"
    elif isinstance(expected, Mapping):
        assert list(expected) == list(found), f"{where}: expected keys {list(expected)}, found {list(found)}"
        for key in expected:
            assert_same_bits(expected[key], found[key], f"{where}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, str | bytes):
        assert len(expected) == len(found), f"{where}: expected {len(expected)} items, found {len(found)}"
        for n, (a, b) in enumerate(zip(expected, found, strict=True)):
            assert_same_bits(a, b, f"{where}[{n}]")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same_bits(getattr(expected, field.name), getattr(found, field.name), f"{where}.{field.name}")
    else:
        assert expected == found or (expected != expected and found != found), (
            f"{where}: expected {expected!r}, found {found!r}"
        )


def _difference(expected: torch.Tensor, found: torch.Tensor) -> str:
    if (expected.shape, expected.dtype, expected.device) != (found.shape, found.dtype, found.device):
        return (
            f"expected {tuple(expected.shape)} {expected.dtype} {expected.device}, "
            f"found {tuple(found.shape)} {found.dtype} {found.device}"
        )
    if expected.layout is not torch.strided or expected.is_quantized:
        return f"{expected.layout} tensors differ"
    a, b = expected.detach().flatten(), found.detach().flatten()
    wrong = ~((a == b) | (a.isnan() & b.isnan()))
    first = int(wrong.nonzero()[0]) if bool(wrong.any()) else 0
    gap = float((a - b).abs().nan_to_num(nan=float("inf")).max()) if a.dtype != torch.bool else float("nan")
    return (
        f"bits differ in {int(wrong.sum())} of {a.numel()} elements, by at most {gap:.3g}; "
        f"first at {first}: expected {a[first].item()!r}, found {b[first].item()!r}"
    )


def run_from_seed(program: Program, call: Callable[..., Any], seed: int = 0) -> dict[str, Any]:
    """What a program returns, and where it leaves the random streams."""
    seed_everything(seed)
    result = program(call)
    return {"result": result, "streams": random_streams()}


def assert_equal_to_plain(contender: Any, program: Program, *, runs: int = 1) -> None:
    """Run ``program`` plainly and, ``runs`` times, with the contender: same bits each time."""
    for seed in range(runs):
        expected = run_from_seed(program, plain, seed)
        found = run_from_seed(program, contender.checkpoint, seed)
        assert_same_bits(expected, found, f"run {seed}: ")


def grads(*holders: Any) -> list[torch.Tensor | None]:
    """The gradients of tensors and of modules' parameters, in order."""
    out: list[torch.Tensor | None] = []
    for holder in holders:
        tensors = list(holder.parameters()) if isinstance(holder, nn.Module) else [holder]
        out += [None if t.grad is None else t.grad.detach().clone() for t in tensors]
    return out


def buffers(*modules: nn.Module) -> list[torch.Tensor]:
    """Copies of the modules' buffers, in order."""
    return [b.detach().clone() for m in modules for b in m.buffers()]


def training(
    build: Callable[[], Any], inputs: Callable[[], Sequence[Any]], *, steps: int = 3, learn: bool = True
) -> Program:
    """The usual program: one region trained for some steps, with other inputs in every step.

    ``build()`` gives the callable of the region (a module, or a function; a function's parameters are found in its
    ``parameters`` attribute). ``inputs()`` gives fresh arguments. Compared: outputs, gradients of inputs and
    parameters, buffers. From the second step on the contender is in its steady state.
    """

    def program(call: Callable[..., Any]) -> Any:
        region = build()
        is_module = isinstance(region, nn.Module)
        parameters = list(region.parameters()) if is_module else list(getattr(region, "parameters", ()))
        seen = []
        for _ in range(steps):
            args = list(inputs())
            out = call(region, *args)
            outs = [t for t in (out if isinstance(out, tuple | list) else [out]) if torch.is_tensor(t)]
            wanted = [t for t in outs if t.requires_grad]
            loss = sum((t.abs() if t.is_complex() else t.float()).pow(2).sum() for t in wanted)
            loss.backward()
            leaves = [t for t in args if torch.is_tensor(t) and t.is_leaf and t.requires_grad]
            seen.append([[t.detach().clone() for t in outs], grads(*leaves, *parameters)])
            if is_module:
                seen.append(buffers(region))
            with torch.no_grad():
                for p in parameters:
                    if learn and p.grad is not None:
                        p.sub_(p.grad, alpha=1e-3)
                    p.grad = None
        return seen

    return program
