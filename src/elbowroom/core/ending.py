"""The end of a region: bind what was saved, finish the program, let go of what nothing needs (rules 4, 6, 9)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from elbowroom.core.drafting import written_unseen
from elbowroom.core.geometry import has_strided_storage, over
from elbowroom.core.hermetic import hermetic
from elbowroom.core.numbering import alias
from elbowroom.core.program import OPAQUE, PARAMETER, Slot, tensors_of
from elbowroom.core.proof import fingerprint, provable
from elbowroom.errors import UsageError

if TYPE_CHECKING:
    from elbowroom.core.recorder import Recorder


def conclude(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Bind what was saved, finish the program, and let the tape go of what nothing needs."""
    if recorder.proving:
        _look_again(recorder)
    recorder.apply_touches()
    program = recorder.program
    if recorder.following and not _ends_as_known(recorder) and not recorder.ended_elsewhere():
        recorder.leave()
    program = recorder.program
    if not recorder.following:
        program.touched_last = recorder.applied
        program.slots = _bindings(recorder)
        _name_sources(recorder, args, kwargs)
        program.finish()
        _keep_what_lost_its_source(recorder)
        recorder.region.family.add(program)
    for v, storage in recorder.parameters.items():
        held = recorder.tape.held[v]
        if isinstance(held, Parameter) and held.untyped_storage()._cdata != storage._cdata:
            # Somebody gave the parameter other data while the region ran: what was read is what a replay reads.
            geometry = program.values[v].geometry
            assert geometry is not None
            recorder.tape.held[v] = over(storage, geometry, held.device)
    recorder.region.ran(program, proved=recorder.proving)
    if recorder.may_be_direct:
        recorder.tape.direct = program.direct
    recorder.tape.close()


def _ends_as_known(recorder: Recorder) -> bool:
    """Whether the call was the program's to its end; a proof that no longer holds is an error (rule 9)."""
    program = recorder.program
    lost = [v for v in recorder.lost if v < len(program.counts) and program.counts[v]]
    if lost:
        recorder.doubt(next((op for op in program.ops if lost[0] in op.reads), None))
        return False
    if recorder.strayed or recorder.n_ops != len(program.ops) or recorder.n_slots != len(program.slots):
        return False
    if recorder.applied != program.touched_last:
        recorder.doubt(program.ops[-1] if program.ops else None)
        return False
    if len(recorder.storages) != len(program.values):
        return False
    return not recorder.proving or _bindings(recorder) == program.slots


def _look_again(recorder: Recorder) -> None:
    """Writes that nobody recorded, after the last reader: compare fingerprints at the region's end (rule 9)."""
    assert recorder.tape.keys is not None or not recorder.prints
    if recorder.tape.keys is None:
        return
    seen = set()
    with hermetic(recorder.tape.keys):
        saved = [t for t, _ in recorder.late.values()]
        for tensor in [*saved, *(h for h in recorder.tape.held if isinstance(h, Tensor) and has_strided_storage(h))]:
            value = recorder.table.get(tensor.untyped_storage()._cdata)
            if value is None or value in seen or value not in recorder.prints or not provable(tensor):
                continue
            seen.add(value)
            if fingerprint(tensor) != recorder.prints[value]:
                written_unseen(recorder, value, tensor)


def _bindings(recorder: Recorder) -> list[Slot]:
    """A saved tensor means its storage as it is at the region's end, unless plain autograd would refuse it (rule 6)."""
    values = recorder.program.values
    slots = []
    for i, slot in enumerate(recorder.program.slots[: recorder.n_slots]):
        newest = recorder.table[recorder.storages[slot.value]]
        if slot.value in recorder.crowded.get(recorder.storages[slot.value], ()) and values[newest].kind == PARAMETER:
            newest = slot.value  # another parameter of the same flat storage is no newer version of this one
        written = newest != slot.value and not (newest < len(values) and values[newest].alias_of == slot.value)
        tensor, version = recorder.late.get(i, (None, None))
        slots.append(
            slot._replace(bound=newest, dead=_refusal(recorder, slot, newest, tensor, version) if written else "")
        )
        if values[newest].unfilled and tensor is not None and not recorder.following:
            info = values[newest]
            info.kind, info.why = OPAQUE, "it was saved before any recorded operator filled it"
            recorder.tape.held[newest] = alias(tensor, info.geometry)
    return slots


def _refusal(recorder: Recorder, slot: Slot, newest: int, tensor: Tensor | None, version: int | None) -> str:
    """The error for a saved tensor that was overwritten since; empty if plain autograd would take the new content."""
    if tensor is not None:
        counted = tensor.is_inference() or tensor._version != version
        if not counted or torch.autograd.graph._allow_mutation_on_saved_tensors_enabled:
            return ""
        return (
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{slot.geometry}] is at version {tensor._version}; expected version {version} instead."
        )
    # Saved while a program was followed that this call left. What the program knew of its writes holds; of another one
    # the counter is not known, and plain autograd might refuse it: so it is refused.
    if slot.dead or slot.bound == newest:
        return slot.dead
    return (
        f"a saved tensor [{slot.geometry}] was overwritten, in a call that did other operators than the calls before "
        f"it: whether the write was counted is not known any more. Write before it is saved, or to a copy of it."
    )


def _keep_what_lost_its_source(recorder: Recorder) -> None:
    """Saved values that only a lost source could replay: keep them, while autograd's own tensor is still here."""
    program = recorder.program
    if not recorder.lost:
        return
    for i, slot in enumerate(program.slots):
        leaves: set[int] = set()
        at_hand = bytearray(v.at_hand for v in program.values)
        program.needs(slot.bound, at_hand, set(), leaves)
        if slot.dead or not leaves & recorder.lost or slot.bound in recorder.lost or i not in recorder.late:
            continue
        value = program.values[slot.bound]
        value.kind, value.why = OPAQUE, "the input it was computed from was overwritten"
        recorder.tape.held[slot.bound] = alias(recorder.late[i][0], value.geometry)
    program.finish()


def _name_sources(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    names: dict[int, str] = {}
    for i, tensor in enumerate(tensors_of(args)):
        if has_strided_storage(tensor):
            names[tensor.untyped_storage()._cdata] = f"argument {i}"
    for key, item in kwargs.items():
        for tensor in tensors_of(item):
            if has_strided_storage(tensor):
                names[tensor.untyped_storage()._cdata] = f"argument {key!r}"
    module = recorder.region.module()
    if module is not None:
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if has_strided_storage(tensor):
                names[tensor.untyped_storage()._cdata] = f"{type(tensor).__name__.lower()} {name!r}"
    for v, value in enumerate(recorder.program.values):
        if value.maker < 0 and value.name is None:
            value.name = names.get(recorder.storages[v])


def explained(error: RuntimeError, region: str) -> UsageError | None:
    """A clearer error for what torch refuses inside a region (rule 10)."""
    text = str(error)
    if "saved tensor hooks" in text and "torch.func" in text:
        return UsageError(
            f"region {region} calls a gradient transform of torch.func (grad, vjp, jacrev, ...) inside it, and torch "
            f"does not allow that under saved-tensor hooks, which checkpointing needs. Leave this region out, or use "
            f"torch.autograd.grad(..., create_graph=True) in it. A transform around the region works."
        )
    return None
