"""Recording in full: what a new operator reads, makes and writes, and whether it is proved (rules 6, 8, 9).

Functions over a Recorder that drafts a program (or proves a known one again); the steady state never comes here.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from elbowroom.core.geometry import geometry_of, has_strided_storage
from elbowroom.core.hermetic import hermetic
from elbowroom.core.matching import over_storage
from elbowroom.core.numbering import alias
from elbowroom.core.operators import Facts, written_arguments
from elbowroom.core.program import (
    MADE,
    OPAQUE,
    PARAMETER,
    Operator,
    Ref,
    Value,
    refs_of,
    tensors_of,
)  # fmt: skip
from elbowroom.core.proof import Rerun, fingerprint, in_generated_code, provable

if TYPE_CHECKING:
    from elbowroom.core.recorder import Recorder

UNSEEN_WRITE = "it was written without PyTorch seeing it"

_TORCH = os.path.dirname(torch.__file__)
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
#: Whose frames are not the user's code. (``models`` is.)
_OURS = (_TORCH, os.path.join(_PACKAGE, "core"), os.path.join(_PACKAGE, "fitting"))


class Draft:
    """An operator about to run in full recording: its templates, what it will write, what the proof needs."""

    def __init__(
        self, recorder: Recorder, func: Any, facts: Facts, args: Any, kwargs: Any,
        wiring: list[Any], scalars: list[Any], first_value: int, known: Operator | None,
    ) -> None:  # fmt: skip
        self.func, self.facts, self.args, self.kwargs = func, facts, args, kwargs
        self.wiring, self.scalars, self.first_value, self.known = wiring, scalars, first_value, known
        self.grad_mode = torch.is_grad_enabled()
        self.default_dtype = torch.get_default_dtype()
        self.template = (_template(recorder, args), _template(recorder, kwargs))
        self.written: dict[int, tuple[Tensor, bool]] = {}  # storage -> (tensor, whether it covers and only overwrites)
        for argument, write_only in written_arguments(facts, args, kwargs):
            for tensor in tensors_of(argument):
                if has_strided_storage(tensor):
                    self.written.setdefault(tensor.untyped_storage()._cdata, (tensor, write_only and _covers(tensor)))
        if known is not None:
            for old, _, _ in known.writes:  # the undeclared ones too, found when it was first proved
                tensor = over_storage((args, kwargs), recorder.storages[old])
                self.written.setdefault(recorder.storages[old], (tensor, False))
            recorder.snapshot(recorder.program.snapshots.get(recorder.n_ops, ()))
        else:
            values = recorder.program.values
            self.overwritten = self._overwritten(recorder)
            olds = [recorder.table[address] for address in self.written]
            read = [v for v in olds if values[v].read or v not in self.overwritten]
            recorder.snapshot(tuple(v for v in read if values[v].kind != MADE))
        self.rerun: Rerun | None = None
        self.before: dict[int, tuple[Tensor, int]] = {}
        self.generated = recorder.watched and in_generated_code()
        proving = recorder.proving or (
            known is not None
            and recorder.region.verify != "never"
            and scalars not in recorder.program.proved_scalars.get(recorder.n_ops, ())
        )
        if proving and not self.generated and not facts.empty:
            self._prepare_proof(recorder)

    def _overwritten(self, recorder: Recorder) -> set[int]:
        """Values whose old content is not needed: written over as a whole, and read by no other argument."""
        times_read: dict[int, int] = {}
        for ref in refs_of(self.template):
            times_read[ref.value] = times_read.get(ref.value, 0) + 1
        candidates = {recorder.table[address] for address, (_, only) in self.written.items() if only}
        return {v for v in candidates if times_read.get(v) == 1}

    def _prepare_proof(self, recorder: Recorder) -> None:
        inputs = [t for t in tensors_of((self.args, self.kwargs)) if has_strided_storage(t)]
        if any(not provable(t) for t in inputs if t.numel()):
            return
        assert recorder.tape.keys is not None
        with hermetic(recorder.tape.keys):
            for tensor in inputs:
                address = tensor.untyped_storage()._cdata
                if address not in self.written and address not in self.before and tensor.numel():
                    value = recorder.table[address]
                    if value not in recorder.prints:
                        recorder.prints[value] = fingerprint(tensor)
                    self.before[address] = (tensor, recorder.prints[value])
            states = recorder.tape.rng.get(recorder.n_ops, ())
            written = [t for t, _ in self.written.values()]
            self.rerun = Rerun(self.func, self.facts, self.args, self.kwargs, written, states, self.grad_mode)


def look(recorder: Recorder, facts: Facts, args: Any, kwargs: Any) -> None:
    """Before an operator reads: whose memory was written without PyTorch seeing it? (rule 8)"""
    writes = {id(t) for a, _ in written_arguments(facts, args, kwargs) for t in tensors_of(a)}
    values = recorder.program.values
    assert recorder.tape.keys is not None
    for tensor in tensors_of((args, kwargs)):
        if not has_strided_storage(tensor):
            continue
        value = recorder.table.get(tensor.untyped_storage()._cdata)
        if value is None:
            continue
        if value < len(values) and values[value].unfilled and id(tensor) not in writes:
            recorder.touch(tensor, "it was read before any recorded operator filled it")
        elif tensor.grad_fn is not None and "CppNode" in tensor.grad_fn.name():
            recorder.touch(tensor, "a C++ autograd function made it")
        elif value in recorder.prints and provable(tensor):
            with hermetic(recorder.tape.keys):
                now = fingerprint(tensor)
            if now != recorder.prints[value]:
                written_unseen(recorder, value, tensor)
                recorder.prints[value] = now


def written_unseen(recorder: Recorder, value: int, tensor: Tensor) -> None:
    """Somebody wrote to a value's storage: what was made becomes opaque; of others, what readers saw is lost."""
    if recorder.kind_of(value) == MADE:
        recorder.touch(tensor, UNSEEN_WRITE)
    elif any(value in op.reads for op in recorder.program.ops[: recorder.n_ops]):
        recorder.lost.add(value)


def record(recorder: Recorder, draft: Draft, out: Any) -> None:
    """After the operator ran: prove it, then follow the known one or append a new one."""
    results = list(tensors_of(out))
    undeclared = _undeclared_writes(recorder, draft)
    bad: set[int] = set()
    bad_writes: set[int] = set()
    why = ""
    if undeclared:
        bad, why = set(range(len(results))), "it writes to an argument that its schema does not declare"
    elif draft.rerun is not None:
        assert recorder.tape.keys is not None
        written = [t for t, _ in draft.written.values()]
        bad, bad_writes, why = draft.rerun.differing(out, written, recorder.tape.keys)
    known = draft.known
    if known is not None and not _still_holds(recorder, known, len(results), bad, bad_writes, undeclared):
        if known.scalars == draft.scalars:
            recorder.doubt(known)
        recorder.leave()
        known = None
    first_new = len(recorder.storages)
    if known is not None:
        if known.scalars != draft.scalars:
            recorder.tape.variants[recorder.n_ops] = _variant(known, draft)
            if draft.rerun is not None:
                recorder.program.remember_scalars(recorder.n_ops, draft.scalars)
        recorder.follow(known, draft.args, draft.kwargs, out)
    else:
        _append(recorder, draft, out, undeclared, bad, bad_writes, why)
        recorder.n_ops += 1
    if recorder.proving:
        _take_prints(recorder, first_new, (draft.args, draft.kwargs, out))


def _undeclared_writes(recorder: Recorder, draft: Draft) -> dict[int, Tensor]:
    assert recorder.tape.keys is not None
    changed = {}
    with hermetic(recorder.tape.keys):
        for address, (tensor, before) in draft.before.items():
            now = fingerprint(tensor)
            if now != before:
                changed[address] = tensor
                recorder.prints[recorder.table[address]] = now
    return changed


def _take_prints(recorder: Recorder, first_new: int, tree: Any) -> None:
    assert recorder.tape.keys is not None
    fresh = {recorder.storages[v]: v for v in range(first_new, len(recorder.storages))}
    with hermetic(recorder.tape.keys):
        for tensor in tensors_of(tree):
            if fresh and has_strided_storage(tensor):
                value = fresh.pop(tensor.untyped_storage()._cdata, None)
                if value is not None and provable(tensor):
                    recorder.prints[value] = fingerprint(tensor)


def _still_holds(
    recorder: Recorder,
    known: Operator,
    n_results: int,
    bad: set[int],
    bad_writes: set[int],
    undeclared: dict[int, Tensor],
) -> bool:
    values = recorder.program.values
    if len(known.outputs) != n_results:
        return False  # other scalars (sizes to split into) made another number of results
    if undeclared or any(known.outputs[i] >= 0 and values[known.outputs[i]].kind == MADE for i in bad):
        return False
    return all(values[new].kind != MADE or recorder.storages[old] not in bad_writes for old, new, _ in known.writes)


def _variant(known: Operator, draft: Draft) -> Operator:
    variant = Operator(known.func, known.facts, *draft.template)
    for name in ("wiring", "flat", "reads", "outputs", "writes", "touched", "first_value", "line", "module"):
        setattr(variant, name, getattr(known, name))
    variant.scalars = draft.scalars
    variant.grad_mode, variant.default_dtype = draft.grad_mode, draft.default_dtype
    return variant


def _append(
    recorder: Recorder, draft: Draft, out: Any, undeclared: dict[int, Tensor],
    bad: set[int], bad_writes: set[int], why: str,
) -> None:  # fmt: skip
    program = recorder.program
    op = Operator(draft.func, draft.facts, *draft.template)
    op.wiring, op.scalars, op.first_value = draft.wiring, draft.scalars, draft.first_value
    op.grad_mode, op.default_dtype, op.touched = draft.grad_mode, draft.default_dtype, recorder.applied
    op.line, op.module = where(recorder)
    op.opaque = draft.generated
    op.flat = type(out) is tuple and all(isinstance(t, Tensor) for t in out)
    # An allocation has no content to prove: read before a recorded fill, its value becomes opaque.
    op.proved = draft.facts.empty or (draft.rerun is not None and not bad and not bad_writes)
    if not (bad or bad_writes or undeclared):
        why = ""
    if op.opaque:
        why = "a compiler's generated code ran it, among kernels that nobody sees"
    program.ops.append(op)
    written = dict(draft.written)
    written.update((address, (tensor, False)) for address, tensor in undeclared.items())
    overwritten = draft.overwritten if draft.known is None else draft._overwritten(recorder)
    op.reads = tuple(dict.fromkeys(r.value for r in refs_of(draft.template) if r.value not in overwritten))
    writes = []
    for address, (tensor, _) in written.items():
        old = recorder.table[address]
        opaque = op.opaque or address in bad_writes or address in undeclared
        new = _new_version(recorder, op, old, tensor, opaque, why, lost=address in undeclared)
        writes.append((old, new, old not in overwritten))
    op.writes = tuple(writes)
    for v in op.reads:
        program.values[v].read = True
    op.outputs = tuple(
        _new_output(recorder, op, i, t, op.opaque or i in bad, why) for i, t in enumerate(tensors_of(out))
    )


def _new_version(recorder: Recorder, op: Operator, old: int, tensor: Tensor, opaque: bool, why: str, lost: bool) -> int:
    """A write makes a new version of the storage; the old one is there no more, unless it was copied (rule 6)."""
    program, held = recorder.program, recorder.tape.held
    before = program.values[old]
    if before.kind == MADE:
        before.keep = False
        held[old] = None
    elif lost:
        recorder.lost.add(old)
        held[old] = None
    elif not before.read and old not in op.reads:
        held[old] = None
    address = recorder.storages[old]
    nbytes = tensor.untyped_storage().nbytes()
    by_identity = isinstance(tensor, Parameter)  # whatever wrote it, a parameter is a source (rule 11)
    kind = PARAMETER if by_identity else OPAQUE if opaque else MADE
    value = Value(kind, -1 if by_identity else len(program.ops) - 1, nbytes, geometry_of(tensor), tensor.device, why)
    program.values.append(value)
    new = recorder.number(address, tensor if by_identity else None)
    recorder.table[address] = new
    if by_identity:
        recorder.numbers[id(tensor)] = new
    else:
        _decide(recorder, op, new, tensor)
    return new


def _new_output(recorder: Recorder, op: Operator, index: int, tensor: Tensor, opaque: bool, why: str) -> int:
    if not has_strided_storage(tensor):
        return -1  # whoever reads it takes it as a source by identity
    storage = tensor.untyped_storage()
    address = storage._cdata
    if address in recorder.table:
        return -1  # a view of something known, or a written argument
    kind = OPAQUE if opaque else MADE
    value = Value(kind, len(recorder.program.ops) - 1, storage.nbytes(), geometry_of(tensor), tensor.device, why)
    value.unfilled = op.facts.empty and storage.nbytes() > 0
    recorder.program.values.append(value)
    new = recorder.number(address, None)
    recorder.guards.append(storage._weak_ref())  # type: ignore[arg-type]  # an int, whatever its stub says
    recorder.table[address] = new
    _decide(recorder, op, new, tensor)
    return new


def _decide(recorder: Recorder, op: Operator, value: int, tensor: Tensor) -> None:
    """Hold what is opaque, and what the policy asks for."""
    info = recorder.program.values[value]
    if info.kind == MADE:
        info.keep = recorder.asks_to_keep(info, op, tensor)
    if info.at_hand:
        recorder.tape.held[value] = alias(tensor, info.geometry)


def make_opaque(recorder: Recorder, tree: Any, why: str) -> None:
    """An operator that cannot be replayed (it talks to other processes, it resizes): keep all it touched (rule 8)."""
    for tensor in tensors_of(tree):
        if has_strided_storage(tensor) and recorder.table.get(tensor.untyped_storage()._cdata) is not None:
            recorder.touch(tensor, why)
    touches, recorder.pending = recorder.pending, []
    for touch in touches:
        recorder.make_opaque(*touch)


def label(recorder: Recorder, tensor: Tensor, text: str) -> bool:
    """Name the value under ``tensor``; false if this recorder does not know it."""
    if not has_strided_storage(tensor):
        return False
    value = recorder.table.get(tensor.untyped_storage()._cdata)
    if value is None:
        return False
    if recorder.following:
        if recorder.program.values[value].label == text:
            return True  # the program knows
        recorder.leave()
    info = recorder.program.values[value]
    info.label = text
    if info.kind == MADE and not info.keep:
        op = recorder.program.ops[info.maker]
        info.keep = recorder.asks_to_keep(info, op, tensor)
        if info.keep:
            recorder.tape.held[value] = alias(tensor, info.geometry)
    return True


def _template(recorder: Recorder, tree: Any) -> Any:
    if isinstance(tree, Tensor):
        value = recorder.value_of(tree)
        return Ref(value, geometry_of(tree, recorder.base_geometry(value)) if recorder.storages[value] else None)
    if isinstance(tree, list):
        return [_template(recorder, item) for item in tree]
    if type(tree) is tuple:
        return tuple([_template(recorder, item) for item in tree])
    if isinstance(tree, dict):
        return {name: _template(recorder, item) for name, item in tree.items()}
    return tree


def _covers(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def where(recorder: Recorder) -> tuple[str, str]:
    """(source line, module) of the user's code that runs now: the innermost frame outside torch and this package."""
    frame = sys._getframe(1)
    line = ""
    module = ""
    root = recorder.region.module()
    while frame is not None:
        path = frame.f_code.co_filename
        if not line and not path.startswith(_OURS):
            line = f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
        if not module and frame.f_code.co_name == "forward":
            owner = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
            if isinstance(owner, Module):
                module = recorder.region.path_of(owner) if root is not None else type(owner).__name__
        if line and module:
            break
        frame = frame.f_back  # type: ignore[assignment]
    return line or "unknown", module
