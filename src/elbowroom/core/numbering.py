"""Which value is under a tensor: storages by address, parameters by identity, the rest by the object (rules 6, 8, 11).

Values are numbered in the order in which a call meets them, so the numbers are a program's as long as the call does
what the program says.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.nn import Parameter
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from elbowroom.core.geometry import Geometry, geometry_of, has_strided_storage, over
from elbowroom.core.program import MADE, OPAQUE, PARAMETER, SOURCE, Program, Value
from elbowroom.core.replayer import Tape

if TYPE_CHECKING:
    from elbowroom.core.region import Region

_ALIAS_KEYS = DispatchKeySet(DispatchKey.ADInplaceOrView)
PYTHON_KEY = DispatchKeySet(DispatchKey.Python)


def alias(tensor: Tensor, geometry: Geometry | None = None) -> Tensor:
    """A detached alias that shares the version counter, also inside a handler, where torch's own would not (rule 7).

    With ``geometry`` it looks at the storage that way: what is held of a value has the geometry the program says.
    """
    if tensor.is_inference():
        return tensor
    exclude = torch._C._dispatch_tls_local_exclude_set() - _ALIAS_KEYS
    if type(tensor) in (Tensor, Parameter):
        exclude = exclude | PYTHON_KEY  # an outer mode must not see it
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude):
        mine = tensor.detach()
        if geometry is None or geometry.fits(mine) or mine.untyped_storage().nbytes() < geometry.extent_bytes:
            return mine
        if mine.dtype is not geometry.dtype or mine.is_conj() or mine.is_neg() or geometry.conj or geometry.neg:
            return over(mine.untyped_storage(), geometry, mine.device)
        return mine.as_strided(geometry.size, geometry.stride, geometry.offset)


class Numbering:
    """The values of one region call, numbered; what is held of them is in the tape."""

    def __init__(self, region: Region, program: Program | None, *, watched: bool) -> None:
        self.region = region
        self.program = program if program is not None else Program(region.name)
        self.following = program is not None
        self.expected: list[tuple[Any, ...]] = []  # what autograd will save, while we follow
        self.strayed = False  # a source is not what the program says, although no operator showed it yet
        self.watched = watched  # who takes an address is seen as it happens
        self.stopped = False
        self.paused: Any = None  # inside a replayable function
        self.tape = Tape(self.program)
        self.n_ops = 0
        self.n_slots = 0
        self.table: dict[int, int] = {}  # storage -> newest value on it
        self.storages: list[int] = []  # value -> storage (0: none)
        self.guards: list[int] = []  # weak references: an address in the table is never reused while we record
        self.identities: dict[int, tuple[Any, int]] = {}  # tensors without strided storage, by id
        self.numbers: dict[int, int] = {}  # parameters, by id
        self.parameters: dict[int, torch.UntypedStorage] = {}  # parameters as they were read
        self.crowded: dict[int, list[int]] = {}  # storage -> the parameters in it, where there are several
        self.aliases: dict[int, Tensor] = {}  # values that will be touched -> the tensor to hold then
        self.pending: list[tuple[int, Tensor, str]] = []  # touches since the last operator
        self.applied: tuple[int, ...] = ()  # touches applied before the operator that runs now
        self.touched: dict[int, tuple[int, Tensor, str]] = {}  # opaque value -> (the value before, tensor, why)

    def value_of(self, tensor: Tensor, *, detached: bool = False) -> int:
        """The number of the value under a tensor; one never met is a source from here on.

        ``detached``: the tensor is an alias of its own already, as the pack hook gets it.
        """
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
                value = self.number(address, tensor if detached and not tensor.requires_grad else alias(tensor))
            self.guards.append(storage._weak_ref())  # type: ignore[arg-type]  # an int, whatever its stub says
            self.table[address] = value
            if tensor.grad_fn is not None:
                self.tape.activations.add(value)
            self._met(value)
        return value

    def _new_parameter(self, parameter: Tensor, storage: torch.UntypedStorage) -> int:
        address = storage._cdata
        value = self.number(address, parameter)
        self.numbers[id(parameter)] = value
        if "ds_id" not in parameter.__dict__:  # ZeRO-3 frees and gathers by itself
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
            values.append(self.source_value(value))
        elif value >= len(values) or values[value].device != self.tape.held[value].device:  # type: ignore[union-attr]
            self.strayed = True
            self.expected = []

    def kind_of(self, value: int) -> str:
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

    def see(self, args: Any) -> None:
        """A view operator makes no value, but its base may be a source met here for the first time."""
        for item in args:
            if type(item) is Parameter and id(item) in self.numbers:
                continue
            if isinstance(item, Tensor) and not isinstance(item, UninitializedTensorMixin):
                known = len(self.storages)
                value = self.value_of(item)
                if self.following and value == known and not self.fits(self.program, value):
                    # No operator will compare the base itself, only views of it: compare it here.
                    self.strayed = True
                    self.expected = []

    def fits(self, program: Program, value: int) -> bool:
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

    def adopt(self, tensor: Tensor, value: int) -> None:
        """A value that backward replayed inside the region stands for the original from here on."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.table:
            self.guards.append(storage._weak_ref())  # type: ignore[arg-type]  # an int, whatever its stub says
            self.table[storage._cdata] = value

    def base_geometry(self, value: int) -> Geometry | None:
        values = self.program.values
        return values[value].geometry if value < len(values) else None

    def source_value(self, v: int) -> Value:
        held = self.tape.held[v]
        assert isinstance(held, Tensor)
        kind = PARAMETER if isinstance(held, Parameter) else SOURCE
        if not self.storages[v]:
            return Value(kind, -1, 0, None, held.device)
        return Value(kind, -1, held.untyped_storage().nbytes(), geometry_of(held), held.device)

    def snapshot(self, values: tuple[int, ...]) -> None:
        """Copy sources (and opaque values) that the next operator overwrites and that replays need (rule 6)."""
        for v in values:
            held = self.tape.held[v]
            geometry = self.program.values[v].geometry
            if isinstance(held, Tensor) and geometry is not None:
                self.tape.held[v] = over(held.untyped_storage().clone(), geometry, held.device)

    def apply_touches(self) -> None:
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
            self.program.values.append(self.opaque_value(value, tensor, why))

    def touch(self, tensor: Tensor, why: str) -> None:
        """From here on, what is in this storage is not what operators made: keep it (rule 8)."""
        if self.stopped or self.paused is not None or not has_strided_storage(tensor):
            return
        value = self.table.get(tensor.untyped_storage()._cdata)
        if value is None or self.kind_of(value) != MADE or any(v == value for v, _, _ in self.pending):
            return  # a source or an opaque value is held as it is anyway
        self.pending.append((value, alias(tensor, self.base_geometry(value)), why))

    def opaque_value(self, of: int, tensor: Tensor, why: str) -> Value:
        """The version of ``of`` that began when its address was taken."""
        value = Value(
            OPAQUE, -1, tensor.untyped_storage().nbytes(), self.program.values[of].geometry, tensor.device, why
        )
        value.alias_of = of
        return value

    def forget(self) -> None:
        """Autograd holds our hooks, and so this object, as long as the graph lives: it must hold no tensor."""
        free = torch.UntypedStorage._free_weak_ref
        for guard in self.guards:
            free(guard)  # type: ignore[no-untyped-call]
        self.guards = []
        for table in (
            self.table,
            self.identities,
            self.numbers,
            self.parameters,
            self.crowded,
            self.aliases,
            self.touched,
        ):
            table.clear()
        self.pending = []
