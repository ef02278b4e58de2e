"""A call against a known program: follow it, switch to a sibling, or leave for a draft of its own (rule 13)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from elbowroom.core.geometry import Geometry, geometry_of, has_strided_storage
from elbowroom.core.numbering import Numbering, alias
from elbowroom.core.program import MADE, PARAMETER, Operator, Program, Slot, tensors_of
from elbowroom.core.replayer import version_of

if TYPE_CHECKING:
    from elbowroom.core.region import Region


class Matching(Numbering):
    """The steady state: compare each operator and each saved tensor with the program, and note only what it holds."""

    def __init__(self, region: Region, program: Program | None, *, proving: bool, watched: bool) -> None:
        super().__init__(region, program, watched=watched)
        self.proving = proving  # replay and compare each operator right after it ran
        self.thrifty = False  # a proof must not hold what was saved to the region's end
        self.expected = self.program.expected if not proving else []
        self.may_be_direct = False  # autograd may hold saved sources itself: no hooks are around us
        self.n_sure = 0  # values that the operators so far showed to be the program's
        self.restated: dict[int, tuple[Geometry, int]] = {}  # values whose shape is this call's own
        self.late: dict[int, tuple[Tensor, int | None]] = {}  # slot -> what was saved, and its version then
        self.lost: set[int] = set()  # sources whose content went before anybody could take it
        self.failure: Exception | None = None  # what the user must hear when the region ends

    def encode(self, items: Any, wiring: list[Any], scalars: list[Any]) -> None:
        """Split arguments into wiring (which value, which geometry) and scalars (by type and bits)."""
        for item in items:
            kind = type(item)
            if kind is Tensor or kind is Parameter:
                try:
                    value = self.table[item.untyped_storage()._cdata]
                    if kind is Parameter or self.crowded:
                        value = self.numbers.get(id(item), -1)
                        if value < 0:
                            value = self.value_of(item)
                except (KeyError, RuntimeError):
                    value = self.value_of(item)
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
                self.encode(item, wiring, scalars)
            elif isinstance(item, Tensor):
                with torch._C.DisableTorchFunction():
                    plain = (item.size(), item.stride(), item.storage_offset()) if has_strided_storage(item) else ()
                    wiring += (kind, self.value_of(item), plain, item.dtype, item.is_conj(), item.is_neg())
            else:
                scalars += (kind, item)

    def elsewhere(self, wiring: list[Any]) -> Operator | None:
        """The operator in a sibling program that is the same so far; else a draft begins here."""
        k = self.n_ops
        for sibling in self.region.family.programs:
            if len(sibling.ops) <= k or sibling.ops[k].wiring != wiring or sibling.ops[k].touched != self.applied:
                continue
            if self.may_switch(sibling):
                self.switch(sibling)
                return sibling.ops[k]
        self.leave()
        return None

    def _saved_elsewhere(self, tensor: Tensor, value: int) -> bool:
        """As ``elsewhere``, where what autograd saves is what tells the programs apart."""
        i = self.n_slots
        for sibling in self.region.family.programs:
            if len(sibling.slots) > i and sibling.slots[i].value == value and self.may_switch(sibling):
                geometry = sibling.slots[i].geometry
                if geometry is not None and geometry.fits(tensor):
                    self.switch(sibling)
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
                and self.may_switch(sibling)
            ):
                self.switch(sibling)
                return True
        return False

    def switch(self, sibling: Program) -> None:
        self._stop_direct()
        self.region.family.used(sibling)
        held = self.tape.held
        for v in self.program.holds - sibling.holds:  # what a plan kept, and this program does not
            if v < len(held) and sibling.values[v].kind == MADE:
                held[v] = None
        self.program = self.tape.program = sibling
        self.expected = sibling.expected if not self.proving else []
        self.strayed = False

    def may_switch(self, sibling: Program) -> bool:
        """Whether ``sibling`` is the same so far, and everything that it needs from the part already run is there."""
        k, n, n_values = self.n_ops, self.n_slots, len(self.storages)
        if sibling.root is self.program.root:
            return False
        if len(sibling.ops) < k or len(sibling.slots) < n or len(sibling.values) < n_values:
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
                and not self.fits(sibling, v)
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
            draft.values.append(self.source_value(v) if touched is None else self.opaque_value(*touched))
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

    def follow(self, op: Operator, args: Any, kwargs: Any, out: Any) -> None:
        """The steady state after an operator ran: number what it made, hold what the program holds."""
        held, table, storages = self.tape.held, self.table, self.storages
        holds = self.program.holds
        if op.writes:
            self._follow_writes(op, args, kwargs)
        if op.outputs:
            kind = type(out)
            results = (out,) if kind is Tensor else out if op.flat else tensors_of(out)
            own_shape = op.facts.dynamic or self.n_ops in self.tape.variants
            for value, tensor in zip(op.outputs, results, strict=True):
                if value >= 0:
                    storage = tensor.untyped_storage()
                    address = storage._cdata
                    storages.append(address)
                    held.append(self._hold(value, tensor) if value in holds else None)
                    if own_shape:
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
                held[new] = self._hold(new, over_storage((args, kwargs), address))
            elif self.program.values[new].kind == PARAMETER:
                held[new] = parameter = over_storage((args, kwargs), address)
                self.numbers[id(parameter)] = new

    def _hold(self, value: int, tensor: Tensor) -> Tensor | None:
        info = self.program.values[value]
        mine = alias(tensor, info.geometry)
        if info.kind == MADE and not (info.keep and self.program.counts[value]):
            self.aliases[value] = mine  # held only once it is touched
            return None
        return mine

    def save(self, tensor: Tensor) -> int:
        """The number of the slot of a saved tensor; -1 if it has no strided storage and is kept as it is."""
        value = self.value_of(tensor, detached=True)
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
                slot = self.program.slots[i]
                if self.proving and (not self.thrifty or slot.bound != value or slot.dead):
                    self.late[i] = (tensor, version_of(tensor))
                return i
        self.program.slots.append(Slot(value, geometry_of(tensor, self.base_geometry(value)), value))
        self.program.values[value].read = True
        self.late[i] = (tensor, version_of(tensor))
        self.n_slots += 1
        return i

    def forget(self) -> None:
        super().forget()
        self.late.clear()


def over_storage(tree: Any, address: int) -> Tensor:
    """The first tensor in ``tree`` over a storage."""
    return next(t for t in tensors_of(tree) if has_strided_storage(t) and t.untyped_storage()._cdata == address)
