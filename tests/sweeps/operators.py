"""Torch's own operator and module databases, run through a region and compared with a plain call, bit for bit.

Each sample runs twice through one region: first while the program is new, then in the steady state with other numbers
of the same shapes. What plain itself does not reproduce (plain twice gives other bits) is left out, at run time.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.conformance.equality import assert_same_bits, plain, seed_everything

DTYPES = (torch.float32, torch.bfloat16, torch.complex64)

# Operators whose result is what happened to be in memory: no two calls need agree, plain ones included.
READS_UNINITIALISED_MEMORY = {
    "empty": "gives uninitialised memory",
    "empty_like": "gives uninitialised memory",
    "empty_permuted": "gives uninitialised memory",
    "empty_strided": "gives uninitialised memory",
    "new_empty": "gives uninitialised memory",
    "new_empty_strided": "gives uninitialised memory",
    "linalg.lstsq": "the gelsy driver starts from a pivot array that torch does not fill",
}

# C++ code of torch that takes another path (other sums, so other last bits) while any dispatch mode is active: a region
# is compared with a plain call under a mode that does nothing.
ASKS_FOR_MODES = {
    "nn.CrossEntropyLoss": "label smoothing with class weights: isTensorSubclassLike(weight) is true under a mode",
    "nn.LinearCrossEntropyLoss": "the same, through cross_entropy_loss",
    "nn.functional.cross_entropy": "the same",
    "nn.functional.linear_cross_entropy": "the same",
}


class _Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def control(name: str) -> Callable[..., Any]:
    """The call that a region is compared with."""

    def under_a_mode(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Nothing():
            return fn(*args, **kwargs)

    return under_a_mode if name in ASKS_FOR_MODES else plain


@dataclasses.dataclass
class Tally:
    """What a sweep did: samples compared, samples left out, and one line per failure."""

    compared: int = 0
    raised: int = 0
    not_reproducible: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.compared += other.compared
        self.raised += other.raised
        self.not_reproducible += other.not_reproducible
        self.failures += other.failures

    def __str__(self) -> str:
        head = (
            f"{self.compared} samples compared, {self.raised} where plain raises, "
            f"{self.not_reproducible} not reproducible, {len(self.failures)} failures"
        )
        return "\n".join([head, *self.failures[:40]])


def operator_names() -> list[str]:
    """Every entry of the operator database, variants included, in order."""
    return [op.formatted_name for op in op_db]


@functools.cache
def _operators() -> dict[str, Any]:
    return {op.formatted_name: op for op in op_db}


def fresh(value: Any) -> Any:
    """A copy of a sample's tensors, so that no run sees what another one wrote."""

    def copy(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        with torch.no_grad():
            twin = item.detach().clone()
        return twin.requires_grad_(item.requires_grad)

    return tree_map(copy, value)


def dirty_free_memory() -> None:
    """Fill freed blocks of small sizes with a pattern: a kernel that reads memory nobody wrote shows itself."""
    blocks = [torch.full((2**power,), 0x5A, dtype=torch.uint8) for power in range(4, 13) for _ in range(8)]
    del blocks


def reproducible(
    call: Callable[..., Any], fn: Callable[..., Any], args: Any, kwargs: Any, expected: Any, *, tries: int = 12
) -> bool:
    """Whether plain calls over differently used memory give the same bits (some LAPACK drivers' do not)."""
    for _ in range(tries):
        dirty_free_memory()
        if not _agree(expected, outcome(call, fn, args, kwargs)):
            return False
    return True


def outcome(call: Callable[..., Any], fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Outputs and gradients of one call from a fixed seed, or the type of what it raised."""
    seed_everything(7)
    args, kwargs = fresh(args), fresh(kwargs)
    leaves = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor) and t.requires_grad]
    try:
        out = call(fn, *args, **kwargs)
        outs = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        wanted = [t for t in outs if t.requires_grad]
        gradients = []
        if wanted and leaves:
            generator = torch.Generator().manual_seed(1)
            weights = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in wanted]
            gradients = torch.autograd.grad(wanted, leaves, weights, allow_unused=True)
        return [[t.detach() for t in outs], list(gradients), torch.get_rng_state()]
    except Exception as error:
        if "elbowroom" in type(error).__module__:
            return f"{type(error).__name__}: {error}"[:200]
        return type(error).__name__


def compare(contender: Any, name: str, fn: Callable[..., Any], samples: list[tuple[Any, Any]], tally: Tally) -> None:
    """Run one sample, then its twin with other numbers, through one region; note what differs from plain."""
    call = control(name.split()[0])
    for n, (args, kwargs) in enumerate(samples):
        expected = outcome(call, fn, args, kwargs)
        if not reproducible(call, fn, args, kwargs, expected, tries=1):
            tally.not_reproducible += 1
            return
        found = outcome(contender.checkpoint, fn, args, kwargs)
        if isinstance(expected, str):
            tally.raised += 1
        else:
            tally.compared += 1
        try:
            assert isinstance(expected, str) or not isinstance(found, str), f"call {n + 1}: {found}"
            assert_same_bits(expected, found, f"call {n + 1}")
        except AssertionError as error:
            if not reproducible(call, fn, args, kwargs, expected):
                tally.not_reproducible += 1
                return
            shapes = [tuple(t.shape) if isinstance(t, Tensor) else t for t in tree_flatten((args, kwargs))[0]]
            tally.failures.append(f"{name} {str(shapes)[:80]}: {str(error)[:160]}")


def _agree(a: Any, b: Any) -> bool:
    try:
        assert_same_bits(a, b)
    except AssertionError:
        return False
    return True


def sweep_operator(contender: Any, name: str, *, most_samples: int | None = None) -> Tally:
    """All samples (or the first few) of one operator, in each of its dtypes."""
    op, tally = _operators()[name], Tally()
    if op.name in READS_UNINITIALISED_MEMORY:
        return tally
    for dtype in DTYPES:
        if dtype not in op.supported_dtypes("cpu"):
            continue
        wants_grad = dtype in op.supported_backward_dtypes("cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for first, second in _pairs(op, dtype, wants_grad, most_samples):
                # A wrapper of its own per sample: one region, one program, two calls.
                fn = functools.partial(op.op)
                compare(contender, f"{op.name} {op.variant_test_name} {str(dtype)[6:]}", fn, [first, second], tally)
    return tally


def _pairs(op: Any, dtype: torch.dtype, wants_grad: bool, most: int | None) -> Iterator[Any]:
    """Samples with twins: the same shapes and options, other numbers."""
    drawn = []
    for seed in (0, 1):
        seed_everything(seed)
        samples = []
        try:
            for sample in op.sample_inputs("cpu", dtype, requires_grad=wants_grad):
                samples.append(((sample.input, *sample.args), sample.kwargs))
                if most is not None and len(samples) >= most:
                    break
        except Exception:  # a sample generator that cannot serve this build of torch
            return
        drawn.append(samples)
    yield from zip(*drawn, strict=False)


def module_names() -> list[str]:
    return [entry.name for entry in module_db]


def sweep_module(contender: Any, name: str, *, most_samples: int | None = None) -> Tally:
    """All samples (or the first few) of one module, in training mode: outputs, gradients and buffers."""
    entry, tally = next(e for e in module_db if e.name == name), Tally()
    for dtype in (torch.float32, torch.bfloat16):
        if dtype not in entry.dtypes:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seed_everything(0)
            try:
                samples = entry.module_inputs_func(entry, "cpu", dtype, True, True)
            except Exception:
                continue
            for sample in samples[:most_samples]:
                _compare_module(contender, f"{name} {str(dtype)[6:]}", entry, sample, dtype, tally)
    return tally


def _compare_module(contender: Any, label: str, entry: Any, sample: Any, dtype: torch.dtype, tally: Tally) -> None:
    if sample.forward_input is None:
        return

    def train(call: Callable[..., Any]) -> Any:
        seed_everything(3)
        build = sample.constructor_input
        module = entry.module_cls(*fresh(build.args), **fresh(build.kwargs)).to(dtype).train()
        seen = []
        for _ in range(2):
            given = outcome(call, module, sample.forward_input.args, sample.forward_input.kwargs)
            if isinstance(given, str):
                return given
            seed_everything(4)
            out = call(module, *fresh(sample.forward_input.args), **fresh(sample.forward_input.kwargs))
            total = sum(
                t.abs().float().sum() for t in tree_flatten(out)[0] if isinstance(t, Tensor) and t.requires_grad
            )
            if isinstance(total, Tensor):
                total.backward()
            seen.append([given, [p.grad for p in module.parameters()], [b.clone() for b in module.buffers()]])
        return seen

    expected = train(control(entry.name))
    if not _agree(expected, train(control(entry.name))):
        tally.not_reproducible += 1
        return
    if isinstance(expected, str):
        tally.raised += 1
    else:
        tally.compared += 1
    try:
        assert_same_bits(expected, train(contender.checkpoint), "module")
    except Exception as error:
        tally.failures.append(f"{label}: {type(error).__name__} {str(error)[:200]}")
