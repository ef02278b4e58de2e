"""A region: a callable whose forward is recorded, with its policy, its programs, and when they are proved."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils.checkpoint
from torch.nn import Module

from elbowroom.core.handles import mind_dynamo
from elbowroom.core.policies import Policy, everything, key_of, policy_of
from elbowroom.core.program import Program
from elbowroom.core.recorder import Recorder
from elbowroom.core.replayer import Tape
from elbowroom.errors import UsageError

#: Programs remembered for one piece of code; the longest unused is forgotten.
MAX_PROGRAMS = 32

VERIFY = ("first", "always", "never")


class Family:
    """The programs of all regions that run the same code under the same policy: equal blocks share them."""

    def __init__(self) -> None:
        self.programs: list[Program] = []
        self._lock = threading.Lock()

    def add(self, program: Program) -> None:
        with self._lock:
            self.programs = [program, *self.programs][:MAX_PROGRAMS]

    def used(self, program: Program) -> None:
        """Found again: it is forgotten last."""
        with self._lock:
            self.programs = [program, *(p for p in self.programs if p is not program)]


class Watch(Protocol):
    """Who looks on while one region call runs, forward and backward: what ``fit`` profiles with."""

    def operator_begins(self) -> None: ...

    def operator_ended(self, k: int) -> None: ...

    def forward_ended(self, program: Program, tape: Tape, storages: list[int]) -> None:
        """What ran, what is held of it, and the storage under each value (0: none), still guarded."""

    def returned(self) -> None: ...

    def asks(self, slot: int) -> None: ...

    def got(self, slot: int) -> None: ...

    def released(self, slot: int) -> None: ...


class Order(NamedTuple):
    """How one call is to run: plainly, or along ``program`` (None: the last one), with ``watch`` looking on.

    ``thrifty``: a proof lets go of saved tensors as the program does, and so cannot look at them again at the end.
    """

    plain: bool = False
    program: Program | None = None
    watch: Watch | None = None
    thrifty: bool = False


class Conductor(Protocol):
    """Says of every call of a region how it is to run: a plan in force."""

    def order(self, region: Region) -> Order: ...


class Track:
    """How often one region ran one program, and what of it is proved."""

    __slots__ = ("calls", "in_doubt", "next_proof")

    def __init__(self) -> None:
        self.calls = 0
        self.next_proof = 1
        self.in_doubt = 0


class Region:
    """What is known about one checkpointed callable over all its calls."""

    def __init__(self, name: str, family: Family, keep: Any, verify: str, module: Module | None = None) -> None:
        if verify not in VERIFY:
            raise UsageError(f"verify={verify!r}: it is one of {', '.join(map(repr, VERIFY))}")
        self.name = name
        self.family = family
        self.keep = keep
        self.policy: Policy = policy_of(keep)
        self.verify = verify
        self.warned = False
        self.calls = 0
        self.last: Program | None = None
        self.conductor: Conductor | None = None
        self._tracks: weakref.WeakKeyDictionary[Program, Track] = weakref.WeakKeyDictionary()
        self._module = None if module is None else weakref.ref(module)

    def module(self) -> Module | None:
        return None if self._module is None else self._module()

    def path_of(self, module: Module) -> str:
        root = self.module()
        if root is not None:
            for name, child in root.named_modules():
                if child is module:
                    return name or type(root).__name__
        return type(module).__name__

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``fn``, recording it where backward will ask for something; else plainly (rule 1)."""
        if torch.compiler.is_compiling():
            return under_compile(fn, args, kwargs)
        if self.policy is everything or _plain():
            return fn(*args, **kwargs)
        order = _AS_BEFORE if self.conductor is None else self.conductor.order(self)
        if order.plain:
            return fn(*args, **kwargs)
        if "torch._dynamo" in sys.modules:
            mind_dynamo()
        program = order.program or self.last
        if program is None and self.family.programs:
            program = self.family.programs[0]
        proving = watched = True
        if program is not None:
            track = self._tracks.get(program.root)
            due = track is None or track.calls + 1 >= track.next_proof
            proving = self.verify == "always" or due
            watched = proving or not program.watched
        proving = proving and self.verify != "never"
        recorder = Recorder(self, program, proving=proving, watched=watched, watch=order.watch)
        recorder.thrifty = order.thrifty
        return recorder.run(fn, args, kwargs)

    def ran(self, program: Program, proved: bool) -> None:
        program = program.root
        track = self._tracks.get(program)
        if track is None:
            track = self._tracks[program] = Track()
        track.calls += 1
        program.calls += 1
        self.calls += 1
        self.last = program
        if proved:
            track.next_proof = 2 * track.calls
            track.in_doubt = 0
        else:
            track.in_doubt += 1

    def calls_in_doubt(self, program: Program) -> int:
        track = self._tracks.get(program.root)
        return 0 if track is None else track.in_doubt

    @property
    def programs(self) -> list[Program]:
        """The programs this region ran, most recent first."""
        found = sorted(self._tracks.items(), key=lambda item: item[0] is not self.last)
        return [program for program, _ in found]


_AS_BEFORE = Order()


def under_compile(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A region inside ``torch.compile``: Dynamo knows torch's own checkpoint, and plans with it (rule 1)."""
    return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False, **kwargs)


def _plain() -> bool:
    """Whether backward will ask for nothing, or torch is tracing: then a region is a plain call (rule 1)."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return True
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True  # a transform around the region
    key = torch._C._TorchDispatchModeKey
    return (
        torch._C._get_dispatch_mode(key.PROXY) is not None
        or torch._C._get_dispatch_mode(key.FUNCTIONAL) is not None
        or torch._C._get_tracing_state() is not None
    )


_families: weakref.WeakKeyDictionary[Any, dict[Any, Family]] = weakref.WeakKeyDictionary()
_families_lock = threading.Lock()


def family_of(code: Any, keep: Any) -> Family:
    """The family of a piece of code (a code object, or whatever stands for it) under a policy."""
    with _families_lock:
        by_policy = _families.setdefault(code, {})
        key = key_of(keep)
        if key not in by_policy:
            while len(by_policy) >= MAX_PROGRAMS:
                del by_policy[next(iter(by_policy))]
            by_policy[key] = Family()
        return by_policy[key]
