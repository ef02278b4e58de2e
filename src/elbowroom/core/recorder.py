"""One call of a region, watched below autograd: compare it with a known program, or record a new one (rules 1, 6 to 9, 13).

The steady state *follows* a program: each operator is compared (function, wiring, geometry, scalars by type and bits)
and only what a replay needs is noted. A call that leaves its program *drafts* a new one from there, with the proof on.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from elbowroom.core import drafting
from elbowroom.core.flags import Flags
from elbowroom.core.geometry import Geometry, geometry_of, has_strided_storage, over
from elbowroom.core.operators import Facts, facts_of
from elbowroom.core.policies import Candidate
from elbowroom.core.program import MADE, PARAMETER, SOURCE, Operator, Program, Slot, Value, tensors_of
from elbowroom.core.replayer import LAZY_BITS, Handle, Tape, describe, version_of
from elbowroom.core.rng import remember
from elbowroom.errors import ChangedTensorError, ProofError

if TYPE_CHECKING:
    from elbowroom.core.region import Region

_ALIAS_KEYS = DispatchKeySet(DispatchKey.ADInplaceOrView)
_PYTHON = DispatchKeySet(DispatchKey.Python)

_STRIDED = torch.strided
_PLAIN = frozenset({Tensor, Parameter})

active = threading.local()  # .recorders: the stack of this thread


def _quiet() -> Any:
    """No torch-function mode sees what the recorder asks of tensors; costs nothing where there is none."""
    return torch._C.DisableTorchFunction() if torch._C._len_torch_function_stack() else _NOTHING


_NOTHING = contextlib.nullcontext()


def recorders() -> list[Recorder]:
    """The recorders active in this thread, outermost first."""
    if not hasattr(active, "recorders"):
        active.recorders = []
    return active.recorders  # type: ignore[no-any-return]


def alias(tensor: Tensor, geometry: Geometry | None = None) -> Tensor:
    """A detached alias that shares the version counter, also inside a handler, where torch's own would not (rule 7).

    With ``geometry`` it looks at the storage that way: what is held of a value has the geometry the program says.
    """
    if tensor.is_inference():
        return tensor
    exclude = torch._C._dispatch_tls_local_exclude_set() - _ALIAS_KEYS
    if type(tensor) in (Tensor, Parameter):
        exclude = exclude | _PYTHON  # an outer mode must not see it
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude):
        mine = tensor.detach()
        if geometry is None or geometry.fits(mine) or mine.untyped_storage().nbytes() < geometry.extent_bytes:
            return mine
        if mine.dtype is not geometry.dtype or mine.is_conj() or mine.is_neg() or geometry.conj or geometry.neg:
            return over(mine.untyped_storage(), geometry, mine.device)
        return mine.as_strided(geometry.size, geometry.stride, geometry.offset)


def _is_content(part: Any) -> bool:
    return isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex())


class Flattened:
    """A saved wrapper-subclass tensor as its plain parts (rule 11)."""

    __slots__ = ("context", "kind", "parts", "size", "stride")

    def __init__(self, tensor: Any, pack: Callable[[Tensor], Any]) -> None:
        names, self.context = tensor.__tensor_flatten__()
        self.kind = type(tensor)
        self.size = tensor.size()
        self.stride = tensor.stride()
        parts = {name: getattr(tensor, name) for name in names}
        # Whole-number parts say what shape it is (offsets of a jagged tensor), and by being the very same object.
        self.parts = {n: (True, pack(p)) if _is_content(p) else (False, p) for n, p in parts.items()}

    def rebuilt(self, unpack: Callable[[Any], Tensor]) -> Tensor:
        inner = {n: unpack(p) if packed else p for n, (packed, p) in self.parts.items()}
        return self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)  # type: ignore[no-any-return]


def _fetch(handle: Handle) -> Tensor:
    with torch._C.DisableTorchFunction():
        return handle.tape.fetch(handle.index)


_outside_dynamo: Any = _fetch


def mind_dynamo() -> None:
    """Once Dynamo is loaded, tell it that a replay is none of its business."""
    global _outside_dynamo
    if _outside_dynamo is _fetch:
        _outside_dynamo = torch._dynamo.disable(_fetch)


def unpack(packed: Any) -> Tensor:
    """What autograd gets for what ``Recorder.pack`` gave it."""
    kind = type(packed)
    if kind is Handle:
        if torch.compiler.is_compiling():  # a compiled backward: Dynamo must not look into a replay
            return _outside_dynamo(packed)  # type: ignore[no-any-return]
        with _quiet():
            return packed.tape.fetch(packed.index)  # type: ignore[no-any-return]
    if kind is tuple:  # a source that autograd holds itself, and the version it had
        tensor, version, program, value = packed
        freed = tensor.numel() and not tensor.untyped_storage().nbytes()
        if freed or tensor._version != version:
            raise ChangedTensorError(
                describe(program.values[value]),
                recorded_version=version,
                found_version=tensor._version,
                cause="its storage was freed" if freed else None,
                remedy="Plain autograd refuses it, too: change it after backward, or give the region a copy of it.",
            )
        return tensor  # type: ignore[no-any-return]
    if kind is Flattened:
        return packed.rebuilt(unpack)  # type: ignore[no-any-return]
    return packed  # type: ignore[no-any-return]


class Recorder(TorchDispatchMode):
    """The dispatch mode of one region call. ``program`` is followed if given; ``proving`` turns the proof on."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # a compiled callee inside the region runs compiled (rule 2)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # spares a wrapper of 1.3 µs around every handler call

    def __init__(self, region: Region, program: Program | None, *, proving: bool, watched: bool) -> None:
        super().__init__()
        self.region = region
        self.program = program if program is not None else Program(region.name)
        self.expected = self.program.expected if not proving else []  # what autograd will save, while we follow
        self.following = program is not None
        self.tape = Tape(self.program)
        self.tape.fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        self.tape.flags = Flags.now()
        self.tape.adopt = self._adopt
        self.tape.slots_so_far = lambda: self.n_slots
        self.proving = proving and self.tape.fake is None
        self.watched = watched and self.tape.fake is None
        self.stopped = False
        self.strayed = False  # a source is not what the program says, although no operator showed it yet
        self.paused: tuple[Any, Any, Any, Operator | drafting.Draft | None] | None = (
            None  # inside a replayable function
        )
        self.deferred: list[tuple[Handle, Tensor]] = []  # what that function saved
        self.trouble: Exception | None = None  # our own failure: what went wrong in recording
        self.failure: Exception | None = None  # what the user must hear when the region ends
        self.may_be_direct = False  # autograd may hold saved sources itself: no hooks are around us
        self.n_ops = 0
        self.n_slots = 0
        self.n_sure = 0  # values that the operators so far showed to be the program's
        self.touched: dict[int, tuple[int, Tensor, str]] = {}  # opaque value -> (the value before, tensor, why)
        self.table: dict[int, int] = {}  # storage -> newest value on it
        self.storages: list[int] = []  # value -> storage (0: none)
        self.guards: list[int] = []  # weak references: an address in the table is never reused while we record
        self.identities: dict[int, tuple[Any, int]] = {}
        self.aliases: dict[int, Tensor] = {}  # values that will be touched -> the tensor to hold then
        self.parameters: dict[int, torch.UntypedStorage] = {}  # parameters as they were read
        self.numbers: dict[int, int] = {}  # by id: the values that are parameters
        self.restated: dict[int, tuple[Geometry, int]] = {}  # values whose shape is this call's own
        self.crowded: dict[int, list[int]] = {}  # storage -> the parameters in it, where there are several
        self.pending: list[tuple[int, Tensor, str]] = []  # touches since the last operator
        self.applied: tuple[int, ...] = ()  # touches applied before the operator that runs now
        self.late: dict[int, tuple[Tensor, int | None]] = {}  # slot -> what was saved, and its version then
        self.lost: set[int] = set()  # sources whose content went before anybody could take it
        self.prints: dict[int, int] = {}  # value -> fingerprint, while proving

    # Operators ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.tape.keys is None:
            self._learn_keys()
        if self.stopped or self.paused is not None:
            return func(*args, **kwargs)
        if type(func) is not torch._ops.OpOverload:
            return self._beside(func, args, kwargs)
        if types and any(is_traceable_wrapper_subclass(t) for t in tensors_of((args, kwargs))):
            return NotImplemented  # the subclass runs, and its inner operators come here (rule 11)
        facts = facts_of(func)
        if (
            facts.is_view
            and type(args[0]) is Tensor
            and args[0].layout is _STRIDED
            and args[0].untyped_storage()._cdata in self.table
        ):
            return func(*args, **kwargs)
        step: Operator | drafting.Draft | None = None
        try:
            if torch._C._len_torch_function_stack():
                with torch._C.DisableTorchFunction():  # modes must not see what the recorder asks of tensors
                    step = self._before(func, facts, args, kwargs)
            else:
                step = self._before(func, facts, args, kwargs)
        except Exception as error:
            self._stop(error)
        if facts.simple:
            out = func(*args, **kwargs)
        else:
            with torch._C._ForceDispatchKeyGuard(
                torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set() - LAZY_BITS
            ):
                out = func(*args, **kwargs)
        if facts.is_view or self.stopped:
            return out
        try:
            if torch._C._len_torch_function_stack():
                with torch._C.DisableTorchFunction():
                    self._after(step, func, args, kwargs, out)
            elif type(step) is Operator:
                self.follow(step, args, kwargs, out)
            else:
                self._after(step, func, args, kwargs, out)
        except Exception as error:
            self._stop(error)
        return out

    def _beside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A higher-order operator, whose results are sources to whoever reads them; or one on a bound object (a process
        group, a queue), which may write now or later to any tensor it was given (rule 8)."""
        out = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload):
            try:
                with torch._C.DisableTorchFunction():
                    drafting.make_opaque(self, (args, kwargs, out), f"{func} communicates")
            except Exception as error:
                self._stop(error)
        return out

    def _after(self, step: Operator | drafting.Draft | None, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if isinstance(step, Operator):
            self.follow(step, args, kwargs, out)
        elif step is None:
            drafting.make_opaque(self, (args, kwargs, out), f"{func} communicates or resizes")
        else:
            drafting.record(self, step, out)

    def begin_function(self, call: Any, args: Any, kwargs: Any) -> None:
        """A replayable ``autograd.Function`` begins: one operator of the tape, whatever it does inside (rule 8)."""
        step = None
        try:
            with torch._C.DisableTorchFunction():
                if self.tape.keys is None:
                    self.paused = (call, args, kwargs, None)
                    torch.empty(0)  # any operator: its handler learns the keys
                with torch.no_grad():
                    step = self._before(call, call.facts, args, kwargs)
        except Exception as error:
            self._stop(error)
        self.paused = (call, args, kwargs, step)
        self.expected = []

    def abort_function(self) -> None:
        """The function raised: it made nothing, and this call is not what the program says."""
        self.paused = None
        self.deferred = []
        if self.following:
            self.leave()

    def end_function(self, out: Any) -> None:
        """The function is done; what it saved comes after what it returned, as ``FunctionCall`` returns them."""
        assert self.paused is not None
        step, self.paused = self.paused[3], None
        self.expected = self.program.expected if self.following and not self.proving else []
        deferred, self.deferred = self.deferred, []
        if self.stopped or step is None:
            return
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                results = [*tensors_of(out), *(tensor for _, tensor in deferred)]
                if isinstance(step, Operator):
                    self.follow(step, (), {}, results)
                else:
                    drafting.record(self, step, results)
                for handle, tensor in deferred:
                    handle.index = self._save(tensor)
        except Exception as error:
            self._stop(error)

    def _learn_keys(self) -> None:
        include = torch._C._dispatch_tls_local_include_set()
        exclude = torch._C._dispatch_tls_local_exclude_set() - LAZY_BITS
        self.tape.keys = (include - _PYTHON, exclude)

    def _before(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> Operator | drafting.Draft | None:
        """Compare the operator with the program before it runs; None where nothing is recorded of it."""
        if facts.unrecorded:
            if facts.is_view:
                self._see(args)
            return None
        if self.proving:
            drafting.look(self, facts, args, kwargs)
        ops = self.program.ops
        k = self.n_ops
        known = ops[k] if self.following and k < len(ops) else None
        if known is None or self.watched or known.touched or self.applied:
            self._apply_touches()
        first_value = len(self.storages)
        wiring: list[Any] = [func, first_value]
        scalars: list[Any] = [torch.is_grad_enabled(), torch.get_default_dtype()]
        self._encode(args, wiring, scalars)
        if kwargs:
            wiring.append(tuple(kwargs))
            self._encode(kwargs.values(), wiring, scalars)
        if facts.seeded:
            self.tape.rng[k] = remember(args, kwargs)
        if known is None or known.wiring != wiring or known.touched != self.applied or self.strayed:
            if (
                known is not None
                and known.wiring == wiring
                and any(
                    why == drafting.UNSEEN_WRITE
                    for _, _, why in (self.touched[v] for v in self.touched if v >= self.n_sure)
                )
            ):
                self.doubt(known)
            known = self._elsewhere(wiring) if self.following else None
        if known is not None and not self.proving and known.scalars == scalars:
            if known.writes:
                self.snapshot(self.program.snapshots.get(k, ()))
            return known
        return drafting.Draft(self, func, facts, args, kwargs, wiring, scalars, first_value, known)

    def _encode(self, items: Any, wiring: list[Any], scalars: list[Any]) -> None:
        """Split arguments into wiring (which value, which geometry) and scalars (by type and bits)."""
        for item in items:
            kind = type(item)
            if kind is Tensor or kind is Parameter:
                try:
                    value = self.table[item.untyped_storage()._cdata]
                    if kind is Parameter or self.crowded:
                        value = self.numbers.get(id(item), -1)
                        if value < 0:
                            value = self._value(item)
                except (KeyError, RuntimeError):
                    value = self._value(item)
                    if not self.storages[value]:
                        wiring.append(value)
                        continue
                wiring += (
                    value, item.size(), item.stride(), item.storage_offset(), item.dtype, item.is_conj(), item.is_neg(),
                )  # fmt: skip
            elif kind is int or kind is bool:
                scalars += (kind, item)
            elif kind is float:
                scalars += (kind, item if item and item == item else repr(item))  # 0.0 is not -0.0, NaN is NaN
            elif kind is complex:
                scalars += (kind, repr(item))
            elif kind is list or kind is tuple:
                wiring.append(len(item))
                self._encode(item, wiring, scalars)
            elif isinstance(item, Tensor):
                with torch._C.DisableTorchFunction():
                    plain = (item.size(), item.stride(), item.storage_offset()) if has_strided_storage(item) else ()
                    wiring += (kind, self._value(item), plain, item.dtype, item.is_conj(), item.is_neg())
            else:
                scalars += (kind, item)

    def _elsewhere(self, wiring: list[Any]) -> Operator | None:
        """The operator in a sibling program that is the same so far; else a draft begins here."""
        k = self.n_ops
        for sibling in self.region.family.programs:
            if len(sibling.ops) > k and sibling.ops[k].wiring == wiring and sibling.ops[k].touched == self.applied:
                if self._may_switch(sibling):
                    self._switch(sibling)
                    return sibling.ops[k]
        self.leave()
        return None

    def _saved_elsewhere(self, tensor: Tensor, value: int) -> bool:
        """As ``_elsewhere``, where what autograd saves is what tells the programs apart."""
        i = self.n_slots
        for sibling in self.region.family.programs:
            if len(sibling.slots) > i and sibling.slots[i].value == value and self._may_switch(sibling):
                geometry = sibling.slots[i].geometry
                if geometry is not None and geometry.fits(tensor):
                    self._switch(sibling)
                    return True
        self.leave()
        return False

    def ended_elsewhere(self) -> bool:
        """Whether the whole call, now that it is over, was a sibling's."""
        if self.failure is not None or self.lost:
            return False
        for sibling in self.region.family.programs:
            if (
                len(sibling.ops) == self.n_ops
                and len(sibling.slots) == self.n_slots
                and len(sibling.values) == len(self.storages)
                and sibling.touched_last == self.applied
                and self._may_switch(sibling)
            ):
                self._switch(sibling)
                return True
        return False

    def _switch(self, sibling: Program) -> None:
        self._stop_direct()
        self.program = self.tape.program = sibling
        self.expected = sibling.expected if not self.proving else []
        self.strayed = False

    def _may_switch(self, sibling: Program) -> bool:
        """Whether ``sibling`` is the same so far, and everything that it needs from the part already run is there."""
        k, n, n_values = self.n_ops, self.n_slots, len(self.storages)
        if sibling is self.program or len(sibling.ops) < k or len(sibling.slots) < n or len(sibling.values) < n_values:
            return False
        if k and sibling.ops[k - 1] is not self.program.ops[k - 1]:
            return False
        if any(
            a.value != b.value or a.geometry != b.geometry
            for a, b in zip(sibling.slots[:n], self.program.slots[:n], strict=True)
        ):
            return False
        held = self.tape.held
        for v in range(n_values):
            if (
                sibling.values[v].maker < 0
                and held[v] is not None
                and v not in self.touched
                and not self._fits(sibling, v)
            ):
                return False
            if v in sibling.holds and held[v] is None and v not in self.aliases:
                return False
        return not any(at < k and not all(held[v] is not None for v in old) for at, old in sibling.snapshots.items())

    def leave(self) -> None:
        """This call does what no known program does: draft one that shares what was the same so far (rule 13)."""
        self._stop_direct()
        draft = self.program.fork(self.n_ops, self.n_sure, self.n_slots)
        for v, value in enumerate(draft.values):
            if self.tape.held[v] is None and v not in self.aliases:
                if value.kind == MADE:
                    value.keep = False
                else:
                    self.lost.add(v)
        self.program = self.tape.program = draft
        for v in range(self.n_sure, len(self.storages)):
            touched = self.touched.get(v)
            draft.values.append(
                self._source_value(v) if touched is None else drafting.opaque_value(self, touched[0], *touched[1:])
            )
        for slot in draft.slots:
            draft.values[slot.value].read = True
        for v, (geometry, nbytes) in self.restated.items():
            draft.values[v].geometry, draft.values[v].nbytes = geometry, nbytes
        draft.watched = self.watched
        self.expected = []
        self.following = self.strayed = False
        self.proving = self.region.verify != "never" and self.tape.fake is None

    def _stop_direct(self) -> None:
        """Another program: what went to autograd directly stays there, the rest gets handles."""
        if self.may_be_direct and self.n_slots:
            self.tape.direct = frozenset(i for i in self.program.direct if i < self.n_slots)
        self.may_be_direct = False

    def _source_value(self, v: int) -> Value:
        held = self.tape.held[v]
        assert isinstance(held, Tensor)
        kind = PARAMETER if isinstance(held, Parameter) else SOURCE
        if not self.storages[v]:
            return Value(kind, -1, 0, None, held.device)
        return Value(kind, -1, held.untyped_storage().nbytes(), geometry_of(held), held.device)

    # Values -------------------------------------------------------------------------------------------------------

    def _value(self, tensor: Tensor) -> int:
        """The number of the value under a tensor; one never met is a source from here on."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError, ValueError):  # the last: a parameter not yet initialized
            return self._identity(tensor)
        address = storage._cdata
        by_identity = type(tensor) is not Tensor and isinstance(tensor, Parameter)
        value = self.numbers.get(id(tensor)) if by_identity else self.table.get(address)
        if value is not None and address in self.crowded and not by_identity:
            value = self._owner(tensor, self.crowded[address])
        if value is None:
            # An nn.Parameter is a source by identity, whatever wrote it, and whoever shares its storage (rule 11).
            if not has_strided_storage(tensor):
                return self._identity(tensor)
            if by_identity:
                value = self._new_parameter(tensor, storage)
            else:
                value = self.number(address, alias(tensor))
            self.guards.append(storage._weak_ref())
            self.table[address] = value
            if tensor.grad_fn is not None:
                self.tape.activations.add(value)
            self._met(value)
        return value

    def _new_parameter(self, parameter: Tensor, storage: torch.UntypedStorage) -> int:
        address = storage._cdata
        value = self.number(address, parameter)
        self.numbers[id(parameter)] = value
        if not hasattr(parameter, "ds_id"):  # ZeRO-3 frees and gathers by itself
            self.parameters[value] = storage
        before = self.table.get(address)
        if before is not None and isinstance(self.tape.held[before], Parameter):
            self.crowded.setdefault(address, [before]).append(value)
        return value

    def _owner(self, tensor: Tensor, values: list[int]) -> int:
        """Which of several parameters in one flat storage a view looks at."""
        offset = tensor.storage_offset()
        for value in values:
            held = self.tape.held[value]
            if isinstance(held, Tensor) and held.storage_offset() <= offset < held.storage_offset() + max(
                1, held.numel()
            ):
                return value
        return self.table[tensor.untyped_storage()._cdata]

    def _met(self, value: int) -> None:
        """A source was numbered: a draft notes it; a known program must have one there, on the same device."""
        values = self.program.values
        if not self.following:
            values.append(self._source_value(value))
        elif value >= len(values) or values[value].device != self.tape.held[value].device:  # type: ignore[union-attr]
            self.strayed = True
            self.expected = []

    def _kind(self, value: int) -> str:
        values = self.program.values
        if value < len(values):
            return values[value].kind
        return PARAMETER if isinstance(self.tape.held[value], Parameter) else SOURCE

    def number(self, address: int, held: Tensor | None) -> int:
        self.storages.append(address)
        self.tape.held.append(held)
        return len(self.storages) - 1

    def _identity(self, tensor: Tensor) -> int:
        """A tensor without strided storage is a source, known by the object that it is."""
        found = self.identities.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        value = self.number(0, tensor if isinstance(tensor, Parameter) else tensor.detach())
        self.identities[id(tensor)] = (weakref.ref(tensor), value)
        self._met(value)
        return value

    def _see(self, args: Any) -> None:
        """A view operator makes no value, but its base may be a source met here for the first time."""
        for item in args:
            if isinstance(item, Tensor) and not isinstance(item, torch.nn.parameter.UninitializedTensorMixin):
                known = len(self.storages)
                value = self._value(item)
                if self.following and value == known and not self._fits(self.program, value):
                    # No operator will compare the base itself, only views of it: compare it here.
                    self.strayed = True
                    self.expected = []

    def _fits(self, program: Program, value: int) -> bool:
        """Whether a source is, in kind and geometry, what ``program`` says it is."""
        held = self.tape.held[value]
        if not isinstance(held, Tensor) or value >= len(program.values):
            return False
        info = program.values[value]
        if info.kind not in (SOURCE, PARAMETER) or isinstance(held, Parameter) != (info.kind == PARAMETER):
            return False
        if info.geometry is None or not self.storages[value]:
            return info.geometry is None and not self.storages[value]
        return info.device == held.device and info.geometry.fits(held)

    def _adopt(self, tensor: Tensor, value: int) -> None:
        """A value that backward replayed inside the region stands for the original from here on."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.table:
            self.guards.append(storage._weak_ref())
            self.table[storage._cdata] = value

    def snapshot(self, values: tuple[int, ...]) -> None:
        """Copy sources (and opaque values) that the next operator overwrites and that replays need (rule 6)."""
        for v in values:
            held = self.tape.held[v]
            geometry = self.program.values[v].geometry
            if isinstance(held, Tensor) and geometry is not None:
                self.tape.held[v] = over(held.untyped_storage().clone(), geometry, held.device)

    def _apply_touches(self) -> None:
        """Values whose address was taken since the last operator become opaque: new versions of the same storage."""
        if self.following and not self.watched:
            k = self.n_ops
            ops = self.program.ops
            due = ops[k].touched if k < len(ops) else self.program.touched_last
            touches = [(v, self.aliases[v], "its address was taken") for v in due if v in self.aliases]
        else:
            touches, self.pending = self.pending, []
        self.applied = tuple(v for v, _, _ in touches)
        for touch in touches:
            self.make_opaque(*touch)

    def make_opaque(self, value: int, tensor: Tensor, why: str) -> None:
        new = self.number(self.storages[value], tensor)
        self.table[self.storages[value]] = new
        self.touched[new] = (value, tensor, why)
        if not self.following:
            self.program.values.append(drafting.opaque_value(self, value, tensor, why))

    def touch(self, tensor: Tensor, why: str) -> None:
        """From here on, what is in this storage is not what operators made: keep it (rule 8)."""
        if self.stopped or self.paused is not None or not has_strided_storage(tensor):
            return
        value = self.table.get(tensor.untyped_storage()._cdata)
        if value is None or self._kind(value) != MADE or any(v == value for v, _, _ in self.pending):
            return  # a source or an opaque value is held as it is anyway
        self.pending.append((value, alias(tensor, self.base_geometry(value)), why))

    def follow(self, op: Operator, args: Any, kwargs: Any, out: Any) -> None:
        """The steady state after an operator ran: number what it made, hold what the program holds."""
        held, table, storages = self.tape.held, self.table, self.storages
        holds = self.program.holds
        if op.writes:
            self._follow_writes(op, args, kwargs)
        if op.outputs:
            kind = type(out)
            results = (out,) if kind is Tensor else out if op.flat else tensors_of(out)
            for value, tensor in zip(op.outputs, results, strict=True):
                if value >= 0:
                    storage = tensor.untyped_storage()
                    address = storage._cdata
                    storages.append(address)
                    held.append(self._hold(value, tensor) if value in holds else None)
                    if op.facts.dynamic or self.n_ops in self.tape.variants:
                        geometry = self.program.values[value].geometry
                        if geometry is not None and not geometry.fits(tensor):
                            self.restated[value] = (geometry_of(tensor), storage.nbytes())
                    if address not in table:
                        self.guards.append(storage._weak_ref())
                        table[address] = value
        self.n_ops += 1
        self.n_sure = len(storages)

    def _follow_writes(self, op: Operator, args: Any, kwargs: Any) -> None:
        held = self.tape.held
        kept = self.program.snapshots.get(self.n_ops, ())
        for old, new, _ in op.writes:
            address = self.storages[old]
            if old not in kept:
                held[old] = None
                self.aliases.pop(old, None)
            self.storages.append(address)
            self.table[address] = new
            held.append(None)
            if new in self.program.holds:
                held[new] = self._hold(new, drafting.over_storage((args, kwargs), address))
            elif self.program.values[new].kind == PARAMETER:
                held[new] = parameter = drafting.over_storage((args, kwargs), address)
                self.numbers[id(parameter)] = new

    def _hold(self, value: int, tensor: Tensor) -> Tensor | None:
        info = self.program.values[value]
        mine = alias(tensor, info.geometry)
        if info.kind == MADE and not (info.keep and self.program.counts[value]):
            self.aliases[value] = mine  # held only once it is touched
            return None
        return mine

    # Saved tensors ------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        """Autograd saves a tensor: give it a handle."""
        if self.stopped:
            return tensor
        try:
            i = self.n_slots
            if (
                i < len(self.expected)
                and type(tensor) in _PLAIN
                and tensor.layout is _STRIDED
                and not self.crowded
                and not torch._C._len_torch_function_stack()
            ):
                value, size, stride, offset, dtype, conj, neg, direct = self.expected[i]
                if (
                    self.table.get(tensor.untyped_storage()._cdata) == value
                    and tensor.size() == size
                    and tensor.stride() == stride
                    and tensor.storage_offset() == offset
                    and tensor.dtype is dtype
                    and tensor.is_conj() == conj
                    and tensor.is_neg() == neg
                ):
                    self.n_slots = i + 1
                    if direct and self.may_be_direct:
                        return (tensor, tensor._version, self.program, value)
                    return Handle(self.tape, i)
            with _quiet() if type(tensor) is Tensor else torch._C.DisableTorchFunction():
                if self.paused is not None:
                    handle = Handle(self.tape, -1)  # numbered when the function is done
                    self.deferred.append((handle, tensor))
                    return handle
                if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
                    return Flattened(tensor, self.pack)
                i = self._save(tensor)
                if i < 0:
                    return tensor
                if self.may_be_direct and i in self.program.direct:
                    return (tensor, tensor._version, self.program, self.program.slots[i].value)
                return Handle(self.tape, i)
        except Exception as error:
            self._stop(error)
            return tensor

    def _save(self, tensor: Tensor) -> int:
        """The number of the slot of a saved tensor; -1 if it has no strided storage and is kept as it is."""
        value = self._value(tensor)
        if not self.storages[value]:
            return -1
        i = self.n_slots
        if self.following:
            slots = self.program.slots
            if not self.strayed and i < len(slots) and slots[i].value == value and slots[i].geometry.fits(tensor):  # type: ignore[union-attr]
                known = True
            else:
                known = self._saved_elsewhere(tensor, value)
            if known:
                self.n_slots += 1
                if self.proving:
                    self.late[i] = (tensor, version_of(tensor))
                return i
        self.program.slots.append(Slot(value, geometry_of(tensor, self.base_geometry(value)), value))
        self.program.values[value].read = True
        self.late[i] = (tensor, version_of(tensor))
        self.n_slots += 1
        return i

    def base_geometry(self, value: int) -> Geometry | None:
        values = self.program.values
        return values[value].geometry if value < len(values) else None

    # Beginning and end --------------------------------------------------------------------------------------------

    def asks_to_keep(self, value: Value, op: Operator, tensor: Tensor) -> bool:
        """What the policy says; if it raises, that is the user's error: told when the region ends."""
        candidate = Candidate(op.func, value.nbytes, tuple(tensor.shape), tensor.dtype, value.label, op.module, op.line)
        try:
            return bool(self.region.policy(candidate))
        except Exception as error:
            self.failure = self.failure or error
            return False

    def doubt(self, op: Operator | None) -> None:
        """The proof no longer holds: an error, if calls ran since it last held (rule 9)."""
        calls = self.region.calls_in_doubt(self.program)
        if calls and self.failure is None:
            self.failure = ProofError(
                region=self.region.name,
                operator=str(op.func) if op else "an input",
                line=op.line if op else "unknown",
                calls_in_doubt=calls,
            )

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region, once (rule 1)."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.may_be_direct = outer is None and self.following
        stack = recorders()
        stack.append(self)
        try:
            with hooks, drafting.watching(self), self:
                out = fn(*args, **kwargs)
        except RuntimeError as error:
            clearer = drafting.explained(error, self.region.name)
            if clearer is None:
                raise
            raise clearer from error
        finally:
            stack.pop()
            self._end(args, kwargs)
        if self.trouble is not None and not self.region.warned:
            self._warn(self.trouble)
        if self.failure is not None:
            raise self.failure
        if outer is not None:
            self.tape.pack_through(*outer)
        return out

    def _end(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            with torch._C.DisableTorchFunction():
                if self.stopped:
                    self.tape.abandon()
                else:
                    drafting.conclude(self, args, kwargs)
        except Exception as error:
            self._stop(error)
            self.tape.abandon()
        finally:
            free = torch.UntypedStorage._free_weak_ref
            for guard in self.guards:
                free(guard)
            self.guards = []
            # Autograd holds our hooks, and so this recorder, as long as the graph lives: it must hold no tensor.
            self.table, self.late, self.aliases, self.pending, self.identities = {}, {}, {}, [], {}
            self.parameters, self.touched, self.numbers, self.crowded, self.prints = {}, {}, {}, {}, {}

    def _stop(self, error: Exception) -> None:
        """The recorder failed: torch must not see it. Keep everything from here on, and say so once (rule 1)."""
        self.stopped = True
        self.expected = []
        for v, held in enumerate(self.tape.held):  # writes from here on are seen by nobody but the counters
            if isinstance(held, Tensor):
                self.tape.versions[v] = version_of(held)
        self.trouble = self.trouble or error

    def _warn(self, error: Exception) -> None:
        """Once a region, and only when it has ended: a warning may be an error, which must not go through torch."""
        self.region.warned = True
        warnings.warn(
            f"elbowroom: recording region {self.region.name} failed ({type(error).__name__}: {error}); what it saves "
            f"from here on is kept as without checkpointing. Gradients stay right. Please report this.",
            RuntimeWarning,
            stacklevel=2,
        )
