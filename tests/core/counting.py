"""What the engine's tests count: operators replayed and drafted, bytes held; and gradients against a plain call."""

from __future__ import annotations

import gc
import itertools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import elbowroom
from elbowroom.core import drafting
from elbowroom.core.program import Program
from elbowroom.core.replayer import Tape
from tests.conformance.equality import assert_same_bits

_numbers = itertools.count()


def fresh(fn: Callable[..., Any]) -> Any:
    """The same function with a code object of its own: it shares no programs with other tests and examples."""
    code = fn.__code__.replace(co_name=f"{fn.__name__}_{next(_numbers)}")
    copy = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def tapes_of(fn: Any) -> list[Tape]:
    """The tapes of a function that are alive."""
    programs = programs_of(fn)
    return [o for o in gc.get_objects() if type(o) is Tape and o.program in programs]


def tape_of(program: Program) -> Tape:
    """The one living tape of a program."""
    (tape,) = [o for o in gc.get_objects() if type(o) is Tape and o.program is program]
    return tape


def programs_of(fn: Any) -> list[Program]:
    from elbowroom.core.inspection import _regions_in

    return list(dict.fromkeys(p for region in _regions_in(fn) for p in region.programs))


def held_bytes() -> int:
    """Bytes of the distinct storages under all tensors that Python knows: what a tape holds is among them."""
    sizes = {}
    for found in gc.get_objects():
        # Not isinstance: it would wake lazy proxies of other libraries.
        if issubclass(type(found), Tensor) and found.layout is torch.strided and torch._C._has_storage(found):
            storage = found.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


@contextmanager
def drafted() -> Iterator[list[str]]:
    """The names of the operators recorded in full inside: none, in the steady state."""
    seen: list[str] = []
    init = drafting.Draft.__init__

    def counted(self: Any, recorder: Any, func: Any, *rest: Any) -> None:
        seen.append(str(func))
        init(self, recorder, func, *rest)

    drafting.Draft.__init__ = counted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        drafting.Draft.__init__ = init  # type: ignore[method-assign]


def needed_operators(program: Program, *, remade: bool = False) -> set[int]:
    """By brute force: the operators that some saved value cannot do without; with ``remade``, those of kept values that
    could be made again for nothing, too."""
    found: set[int] = set()

    def visit(value: int) -> None:
        hand = program.values[value].at_hand and not (remade and value in program.remade)
        if hand or program.values[value].maker in found:
            return
        found.add(program.values[value].maker)
        for read in program.ops[program.values[value].maker].reads:
            visit(read)

    for slot in program.slots:
        if not slot.dead:
            visit(slot.bound)
    return found


def gradients(call: Callable[..., Any], fn: Any, *args: Any, **settings: Any) -> list[Tensor | None]:
    """Outputs and gradients of all tensor arguments that want one; ``call`` is ``plain`` or ``checkpoint``."""
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    out = call(fn, *args, **settings)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, Tensor) and o.requires_grad]
    sum((o.abs() if o.is_complex() else o).sum() for o in outs).backward()  # type: ignore[union-attr]
    return [o.detach().clone() for o in outs] + [leaf.grad for leaf in leaves]


def plain(fn: Any, *args: Any, **settings: Any) -> Any:
    return fn(*args)


def assert_equal_to_plain(fn: Any, *args: Any, calls: int = 4, **settings: Any) -> None:
    """Several calls in a row: outputs, gradients and the random stream are those of plain calls, bit for bit."""
    for call in range(calls):
        torch.manual_seed(call)
        expected = [gradients(plain, fn, *args), torch.get_rng_state()]
        torch.manual_seed(call)
        found = [gradients(elbowroom.checkpoint, fn, *args, **settings), torch.get_rng_state()]
        assert_same_bits(expected, found, f"call {call + 1}: ")
