"""From what was kept back to what autograd asks for: the tape of one call, and its sweeps (rules 2 to 7 and 12).

A tape holds what the call left behind: sources, kept values, generator states. A *handle* is what autograd holds in
place of a saved tensor; unpacking it asks the tape. Integer counts, taken from the program, say how many live handles
still need each value, so that memory falls handle by handle, without reference cycles and without a collector.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elbowroom.core.flags import Flags
from elbowroom.core.geometry import over, view
from elbowroom.core.hermetic import Keys, hermetic, undisturbed
from elbowroom.core.program import MADE, Operator, Program, Ref, Value, tensors_of
from elbowroom.core.rng import States, drawing_from
from elbowroom.errors import ChangedTensorError, ReplayError


def version_of(tensor: Tensor) -> int | None:
    """The version counter, None for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


class Packed(NamedTuple):
    """A held tensor that went through somebody's saved-tensor hooks (rule 11)."""

    content: Any
    unpack: Callable[[Any], Tensor]


class Handle:
    """What autograd holds instead of a saved tensor. Its death is what releases values."""

    __slots__ = ("index", "tape")

    def __init__(self, tape: Tape, index: int) -> None:
        self.tape = tape
        self.index = index

    def __del__(self) -> None:
        self.tape.release(self.index)


class Tape:
    """The record of one call of a region; lives until its last handle is gone."""

    __slots__ = (
        "__weakref__", "_by_slot", "_cache", "_cache_versions", "_called_back", "_counts", "_early", "_hand",
        "_live", "_lock", "_op_counts", "_pending", "_task", "_unpacked", "_waiting", "activations", "adopt",
        "direct", "fake", "flags", "held", "is_open", "keys", "program", "rng", "slots_so_far", "variants",
        "versions", "watch",
    )  # fmt: skip

    def __init__(self, program: Program) -> None:
        self.program = program
        self.held: list[Tensor | Packed | None] = []
        self.versions: dict[int, int | None] = {}
        self.rng: dict[int, States] = {}
        self.activations: set[int] = set()  # sources that are not leaves of the graph
        self.variants: dict[int, Operator] = {}  # operators that ran with other scalars than the program's
        self.keys: Keys | None = None
        self.fake: Any = None
        self.flags: Flags | None = None
        self.direct: frozenset[int] = frozenset()  # slots whose source autograd holds itself
        self.is_open = True  # the forward is still running
        self.watch: Any = None  # told of what is asked and released
        self.adopt: Callable[[Tensor, int], None] | None = None  # of the recorder, while open
        self.slots_so_far: Callable[[], int] | None = None
        self._lock = threading.RLock()
        self._early: list[int] = []  # handles that died while open
        self._hand = bytearray()  # per value: 1 held, 2 cached
        self._live = bytearray()  # per slot: its handle lives
        self._waiting = bytearray()  # per slot: live and not asked in this graph task
        self._counts: list[int] = []
        self._op_counts: list[int] = []
        self._cache: dict[int, Tensor] = {}
        self._cache_versions: dict[int, int | None] = {}
        self._pending: dict[int, int] = {}
        self._by_slot: dict[int, tuple[int, ...]] = {}
        self._unpacked: dict[int, Tensor] = {}
        self._task = -2
        self._called_back = -2

    # The end of the forward ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """The region has ended: let go of what nothing needs."""
        program = self.program
        assert program.layouts is not None
        if not self.direct:
            layout = program.layouts[0]
        elif self.direct is program.direct:
            layout = program.layouts[1]
        else:
            layout = program.layout(self.direct)
        held = self.held
        for v in layout.unneeded:
            held[v] = None
        for k in layout.moot_draws:
            del self.rng[k]
        for v in (self.activations & program.unsaved) | program.exposed:
            tensor = held[v]
            if isinstance(tensor, Tensor):
                held[v] = _lazily_cloned(tensor)
        self._settle(layout.counts.copy(), layout.op_counts.copy(), layout.needed, layout.live)

    def abandon(self) -> None:
        """The recorder failed: what was kept so far stays while any handle lives (rule 1)."""
        everything = range(len(self.held))
        endless = 1 << 30
        live = b"\1" * len(self.program.slots)
        self._settle([endless] * len(self.held), [endless] * len(self.program.ops), everything, live)

    def _settle(self, counts: list[int], op_counts: list[int], needed: Iterable[int], live: bytes) -> None:
        self._counts, self._op_counts = counts, op_counts
        self._live = bytearray(live)
        self._drop_cache()
        self._hand = bytearray(len(self.held))
        for v in needed:
            tensor = self.held[v]
            if isinstance(tensor, Tensor):
                self._hand[v] = 1
                self.versions.setdefault(v, version_of(tensor))
        self._task = -2
        self.adopt = self.slots_so_far = None
        self.is_open = False
        for index in self._early:
            self._release(index)
        self._early = []

    def pack_through(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        """Hand what is held to the saved-tensor hooks around the region, as autograd would (rule 11)."""
        for v, tensor in enumerate(self.held):
            if isinstance(tensor, Tensor):
                self.held[v] = Packed(pack(tensor), unpack)

    # Asking -------------------------------------------------------------------------------------------------------

    def fetch(self, index: int) -> Tensor:
        """The tensor that slot ``index`` saved."""
        watch = self.watch
        if watch is not None:
            watch.asks(index)
        with self._lock:
            program = self.program
            slot = program.slots[index]
            if slot.dead:
                raise RuntimeError(slot.dead)
            value = slot.bound
            if self.is_open:
                value = slot.value
                self._look_around()
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._enter_task(task)
            base = self._at_hand(value)
            if base is None:
                base = self._sweep(value)
                if self.adopt is not None:
                    self.adopt(base, value)
            if self._unpacked and task != -1:
                self._call_back()
            recorded = program.values[value].geometry
            if slot.geometry is recorded and self._hand[value] == 2:
                tensor = base  # ours, and whole
            elif slot.geometry is recorded or undisturbed():
                tensor = view(base, recorded, slot.geometry)
            else:
                assert self.keys is not None
                with hermetic(self.keys, self.fake):
                    tensor = view(base, recorded, slot.geometry)
            if task == -1 or not _asked_by_python():
                self._asked(index)
            elif (self._hand[value] == 2 and self._pending.get(value, 0) > 1) or (
                self._hand[value] == 1
                and program.values[value].kind == MADE
                and self._counts
                and self._counts[value] > 1
            ):
                # A Python backward may write on what it saved through a raw pointer, and others still replay from it.
                # It may also ask again, so its wait ends with its handle.
                tensor = tensor.clone()
        if watch is not None:
            watch.got(index)
        return tensor

    def _look_around(self) -> None:
        """The region still runs, and backward asks already: what is at hand changes from operator to operator."""
        assert self.slots_so_far is not None
        n_slots, n_values = len(self.program.slots), max(len(self.program.values), len(self.held))
        known, so_far = len(self._live), self.slots_so_far()
        self._live += bytearray(max(0, n_slots - known))
        self._waiting += bytearray(max(0, n_slots - len(self._waiting)))
        for i in range(so_far):
            if not self._live[i] and i not in self._early:
                self._live[i] = 1
                self._waiting[i] = self._task != -1
        for i in self._early:
            self._live[i] = self._waiting[i] = 0
        self._hand = bytearray(1 if h is not None else 2 if v in self._cache else 0 for v, h in enumerate(self.held))
        self._hand += bytearray(n_values - len(self._hand))

    def _enter_task(self, task: int) -> None:
        self._drop_cache()
        self._task = task
        self._waiting = bytearray(self._live) if task != -1 else bytearray(len(self._live))

    def _asked(self, index: int) -> None:
        if self._waiting[index]:
            self._waiting[index] = 0
            for v in self._by_slot.get(index, ()):
                self._pending[v] -= 1
                if not self._pending[v]:
                    self._uncache(v)
        elif self._task == -1:
            self._drop_cache()  # nobody's pass: a look from outside leaves nothing behind

    def _at_hand(self, value: int, steps: tuple[Any, ...] = ()) -> Tensor | None:
        """The base of a value at hand and unchanged. Changed: replayed if that is possible, else an error (rule 7)."""
        mark = self._hand[value]
        if mark == 2:
            base = self._cache[value]
            version = self._cache_versions[value]
            if version is None or base._version == version:
                return base
            self._uncache(value)
            return None
        if mark == 0:
            return None
        held = self.held[value]
        if isinstance(held, Packed):
            if value not in self._unpacked:  # once in a pass: torch's own checkpoint allows no more
                self._unpacked[value] = held.unpack(held.content)
            return self._unpacked[value]
        assert held is not None
        version = None if self.is_open else self.versions[value]
        if version is None or held._version == version:
            return held
        info = self.program.values[value]
        if info.maker >= 0 and info.kind == MADE:
            self.held[value] = None
            self._hand[value] = 0
            return None
        reader = next((self.program.ops[k] for k, _, _ in steps if value in self.program.ops[k].reads), None)
        raise ChangedTensorError(
            describe(info),
            operator=None if reader is None else f"{reader.func} (at {reader.line})",
            recorded_version=version,
            found_version=held._version,
            remedy="Change it after backward, or give the region a copy of it.",
        )

    # Sweeping -----------------------------------------------------------------------------------------------------

    def _sweep(self, target: int) -> Tensor:
        assert self.keys is not None
        waiting = self._waiting if self._task != -1 else bytearray(len(self._live))
        while True:  # a changed value leaves the values at hand, and the sweep is planned again without it
            sweep = self.program.sweep(target, self._hand, waiting)
            env = {}
            for v in sweep.leaves:
                base = self._at_hand(v, sweep.steps)
                if base is not None:
                    recorded = self.program.values[v].geometry
                    env[v] = view(base, recorded, recorded)  # is all of it still there?
                elif self.program.values[v].maker < 0 or self.program.values[v].kind != MADE:
                    raise ChangedTensorError(
                        describe(self.program.values[v]),
                        cause="what it depends on was released with another part of the graph",
                        remedy="Keep it (keep=...) or do not change kept values between forward and backward.",
                    )
                else:
                    break
            else:
                break
        with hermetic(self.keys, self.fake), (self.flags or _NO_FLAGS).restored():
            for k, frees, ours in sweep.steps:
                self._run(k, env, ours)
                for v in frees:
                    env.pop(v, None)
        self.program.replays += len(sweep.steps)
        for v in sweep.cached:
            self._cache[v] = env[v]
            self._cache_versions[v] = version_of(env[v])
            self._hand[v] = 2
        self._pending = dict(sweep.pending)
        self._by_slot = sweep.by_slot
        for v in [v for v in self._cache if v not in self._pending and v != target]:
            self._uncache(v)
        if self._task != -1:
            self._call_back()
        return env[target]

    def _call_back(self) -> None:
        """Have torch tell us when this backward pass is over."""
        if self._called_back != self._task:
            self._called_back = self._task
            _at_end_of_task(self)

    def _run(self, k: int, env: dict[int, Tensor], ours: frozenset[int]) -> None:
        """Replay operator ``k``, from ``env`` into ``env``. Never writes to what others hold."""
        op = self.variants.get(k) or self.program.ops[k]
        values = self.program.values
        scratch = self._scratch_for(op, env, ours) if op.writes else {}

        def read(ref: Ref) -> Tensor:
            if ref.value in scratch and ref.geometry is not None:
                return over(scratch[ref.value], ref.geometry, values[ref.value].device)
            return view(env[ref.value], values[ref.value].geometry, ref.geometry)

        if op.grad_mode:
            torch._C._set_grad_enabled(True)
        default_dtype = torch.get_default_dtype()
        if default_dtype is not op.default_dtype:
            torch.set_default_dtype(op.default_dtype)
        try:
            args = []
            for item in op.args:
                kind = type(item)
                if kind is Ref:
                    v, geometry = item
                    args.append(env[v] if geometry is values[v].geometry and v not in scratch else read(item))
                else:
                    args.append(filled(item, read) if kind is list or kind is tuple else item)
            kwargs = filled(op.kwargs, read) if op.kwargs else {}
            if op.facts.seeded:
                with drawing_from(self.rng.get(k, ()), op.facts, kwargs) as kwargs:
                    out = op.call(*args, **kwargs)
            else:
                out = op.call(*args, **kwargs)
        except (ChangedTensorError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ReplayError(
                region=self.program.region, operator=str(op.func), shapes=op.shapes, line=op.line,
                cause=f"{type(error).__name__}: {error}",
            ) from error  # fmt: skip
        finally:
            if op.grad_mode:
                torch._C._set_grad_enabled(False)
            if default_dtype is not op.default_dtype:
                torch.set_default_dtype(default_dtype)
        results = (out,) if type(out) is Tensor else out if op.flat else tensors_of(out)
        for v, result in zip(op.outputs, results, strict=True):
            if v >= 0 and not self._hand[v]:  # a result that is kept stays what it is
                env[v] = self._as_recorded(result, values[v]) if op.facts.dynamic or k in self.variants else result
        for old, new, _ in op.writes:
            geometry = values[new].geometry
            assert geometry is not None
            env[new] = over(scratch[old], geometry, values[new].device)

    @staticmethod
    def _as_recorded(result: Tensor, value: Value) -> Tensor:
        """A result whose shape hangs on data or scalars, in the program's geometry: readers were compared by that."""
        geometry = value.geometry
        if geometry is None or geometry.fits(result) or result.untyped_storage().nbytes() < geometry.extent_bytes:
            return result
        return over(result.untyped_storage(), geometry, result.device)

    def _scratch_for(
        self, op: Operator, env: dict[int, Tensor], ours: frozenset[int]
    ) -> dict[int, torch.UntypedStorage]:
        """A storage for each value that ``op`` writes: a copy, or the old one where nobody else reads it (rule 6)."""
        scratch = {}
        for old, new, reads_old in op.writes:
            info = self.program.values[new]
            if not reads_old:
                scratch[old] = torch.empty(info.nbytes, dtype=torch.uint8, device=info.device).untyped_storage()
            elif old in ours:
                scratch[old] = env[old].untyped_storage()
            else:
                scratch[old] = env[old].untyped_storage().clone()
        return scratch

    # Letting go ---------------------------------------------------------------------------------------------------

    def release(self, index: int) -> None:
        """The handle of slot ``index`` died: autograd will not ask for it again."""
        if index < 0:
            return
        with self._lock:
            if self.is_open:
                self._early.append(index)
            else:
                self._release(index)
            if self.watch is not None:
                self.watch.released(index)

    def _release(self, index: int) -> None:
        self._live[index] = 0
        if self._task >= 0 and self._waiting[index]:
            self._asked(index)
        slot = self.program.slots[index]
        if slot.dead:
            return
        values, ops, counts = self.program.values, self.program.ops, self._counts
        stack = [slot.bound]
        while stack:
            v = stack.pop()
            counts[v] -= 1
            if counts[v]:
                continue
            if self._hand[v] == 2:
                self._uncache(v)
            self.held[v] = None
            self._unpacked.pop(v, None)
            self._hand[v] = 0
            if values[v].at_hand and v not in self.program.remade:
                continue
            k = values[v].maker
            self._op_counts[k] -= 1
            if not self._op_counts[k]:
                self.rng.pop(k, None)
                self.variants.pop(k, None)
                stack.extend(ops[k].reads)

    def end_of_task(self, task: int) -> None:
        """The backward pass that made the caches is over (rule 4)."""
        with self._lock:
            if self._task == task:
                self._drop_cache()
                self._task = -2

    def _uncache(self, value: int) -> None:
        self._cache.pop(value, None)
        self._cache_versions.pop(value, None)
        if value < len(self._hand) and self._hand[value] == 2:
            self._hand[value] = 0

    def _drop_cache(self) -> None:
        for v in list(self._cache):
            self._uncache(v)
        self._unpacked.clear()
        self._pending = {}
        self._by_slot = {}


def filled(template: Any, read: Callable[[Ref], Tensor]) -> Any:
    """Arguments from a template: Refs become tensors, containers are rebuilt as they were."""
    kind = type(template)
    if kind is Ref:
        return read(template)
    if kind is list:
        return [filled(item, read) for item in template]
    if kind is tuple:
        return tuple([filled(item, read) for item in template])
    if kind is dict:
        return {name: filled(item, read) for name, item in template.items()}
    return template


def _at_end_of_task(tape: Tape) -> None:
    task = tape._task
    weak = weakref.ref(tape)

    def end() -> None:
        alive = weak()
        if alive is not None:
            alive.end_of_task(task)

    torch.autograd.Variable._execution_engine.queue_callback(end)


def _asked_by_python() -> bool:
    return isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction)


def _lazily_cloned(tensor: Tensor) -> Tensor:
    """A copy-on-write clone: whoever writes to the original later does not write to ours. Foreign memory stays shared.

    Not for leaves, nor for storages that are not torch's own: there it would cut aliases that others rely on (rule 7).
    """
    try:
        return torch._lazy_clone(tensor)
    except RuntimeError:
        return tensor


def describe(value: Value) -> str:
    """A value in words: the parameter or argument that it is, and its geometry."""
    what = value.name or ("a kept value" if value.maker >= 0 else "an input of the region")
    return f"{what} ({value.geometry})"


_NO_FLAGS = Flags.none()
