"""One call of a region, watched below autograd: followed along a known program, or recorded (rules 1, 6 to 9, 13).

The steady state *follows* a program: each operator is compared (function, wiring, geometry, scalars by type and bits)
and only what a replay needs is noted. A call that leaves its program *drafts* a new one from there, with the proof on.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from elbowroom.core import drafting, ending
from elbowroom.core.flags import Flags
from elbowroom.core.handles import Flattened, quiet, unpack
from elbowroom.core.hermetic import LAZY_BITS
from elbowroom.core.matching import Matching
from elbowroom.core.numbering import PYTHON_KEY
from elbowroom.core.operators import Facts, facts_of
from elbowroom.core.policies import Candidate
from elbowroom.core.program import Operator, Program, Value, tensors_of
from elbowroom.core.proof import AddressWatch
from elbowroom.core.replayer import Handle, version_of
from elbowroom.core.rng import remember
from elbowroom.errors import ProofError

if TYPE_CHECKING:
    from elbowroom.core.region import Region, Watch

_STRIDED = torch.strided
_PLAIN = frozenset({Tensor, Parameter})

_active = threading.local()  # .recorders: the stack of this thread


def recorders() -> list[Recorder]:
    """The recorders _active in this thread, outermost first."""
    if not hasattr(_active, "recorders"):
        _active.recorders = []
    return _active.recorders  # type: ignore[no-any-return]


class Recorder(Matching, TorchDispatchMode):
    """The dispatch mode of one region call. ``program`` is followed if given; ``proving`` turns the proof on."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # a compiled callee inside the region runs compiled (rule 2)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # spares a wrapper of 1.3 µs around every handler call

    def __init__(
        self, region: Region, program: Program | None, *, proving: bool, watched: bool, watch: Watch | None = None
    ) -> None:
        TorchDispatchMode.__init__(self)
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        Matching.__init__(self, region, program, proving=proving and fake is None, watched=watched and fake is None)
        self.tape.fake = fake
        self.tape.flags = Flags.now()
        self.tape.watch = self.watch = watch
        self.tape.adopt = self.adopt
        self.tape.slots_so_far = lambda: self.n_slots
        self.paused: tuple[Any, Any, Any, Operator | drafting.Draft | None] | None = None
        self.deferred: list[tuple[Handle, Tensor]] = []  # what a replayable function saved
        self.trouble: Exception | None = None  # our own failure: what went wrong in recording
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
        timed = self.watch is not None and step is not None
        if timed:
            self.watch.operator_begins()  # type: ignore[union-attr]
        if facts.simple:
            out = func._op(*args, **kwargs)  # the overload without its Python wrapper
        else:
            with torch._C._ForceDispatchKeyGuard(
                torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set() - LAZY_BITS
            ):
                out = func(*args, **kwargs)
        if timed:
            self.watch.operator_ended(self.n_ops)  # type: ignore[union-attr]
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

    def _before(self, func: Any, facts: Facts, args: Any, kwargs: Any) -> Operator | drafting.Draft | None:
        """Compare the operator with the program before it runs; None where nothing is recorded of it."""
        if facts.unrecorded:
            if facts.is_view:
                self.see(args)
            return None
        if self.proving:
            drafting.look(self, facts, args, kwargs)
        ops = self.program.ops
        k = self.n_ops
        known = ops[k] if self.following and k < len(ops) else None
        if known is None or self.watched or known.touched or self.applied:
            self.apply_touches()
        first_value = len(self.storages)
        wiring: list[Any] = [func, first_value]
        scalars: list[Any] = [torch.is_grad_enabled(), torch.get_default_dtype()]
        self.encode(args, wiring, scalars)
        if kwargs:
            wiring.append(tuple(kwargs))
            self.encode(kwargs.values(), wiring, scalars)
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
            known = self.elsewhere(wiring) if self.following else None
        if known is not None and not self.proving and known.scalars == scalars:
            if known.writes:
                self.snapshot(self.program.snapshots.get(k, ()))
            return known
        return drafting.Draft(self, func, facts, args, kwargs, wiring, scalars, first_value, known)

    # Functions that are one operator ------------------------------------------------------------------------------

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
        if self.watch is not None and step is not None:
            self.watch.operator_begins()

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
        if self.watch is not None:
            self.watch.operator_ended(self.n_ops)
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                results = [*tensors_of(out), *(tensor for _, tensor in deferred)]
                if isinstance(step, Operator):
                    self.follow(step, (), {}, results)
                else:
                    drafting.record(self, step, results)
                for handle, tensor in deferred:
                    handle.index = self.save(tensor)
        except Exception as error:
            self._stop(error)

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
                found = self.table.get(tensor.untyped_storage()._cdata)
                if found is None:
                    found = self.value_of(tensor, detached=True)
                if (
                    found == value
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
            with quiet() if type(tensor) is Tensor else torch._C.DisableTorchFunction():
                if self.paused is not None:
                    handle = Handle(self.tape, -1)  # numbered when the function is done
                    self.deferred.append((handle, tensor))
                    return handle
                if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
                    return Flattened(tensor, self.pack)
                i = self.save(tensor)
                if i < 0:
                    return tensor
                if self.may_be_direct and i in self.program.direct:
                    return (tensor, tensor._version, self.program, self.program.slots[i].value)
                return Handle(self.tape, i)
        except Exception as error:
            self._stop(error)
            return tensor

    # Beginning and end --------------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region, once (rule 1)."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        # Who looks on wants to hear of every slot: all of them get handles.
        self.may_be_direct = outer is None and self.following and self.watch is None
        stack = recorders()
        stack.append(self)
        try:
            with hooks, AddressWatch(self.touch) if self.watched else nullcontext(), self:
                out = fn(*args, **kwargs)
        except RuntimeError as error:
            clearer = ending.explained(error, self.region.name)
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
        if self.watch is not None:
            self.watch.returned()
        return out

    def _end(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            with torch._C.DisableTorchFunction():
                if self.stopped:
                    self.tape.abandon()
                else:
                    ending.conclude(self, args, kwargs)
                    if self.watch is not None:
                        self.watch.forward_ended(self.program, self.tape, self.storages)
        except Exception as error:
            self._stop(error)
            self.tape.abandon()
        finally:
            self.forget()
            self.prints = {}

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

    def _learn_keys(self) -> None:
        include = torch._C._dispatch_tls_local_include_set()
        exclude = torch._C._dispatch_tls_local_exclude_set() - LAZY_BITS
        self.tape.keys = (include - PYTHON_KEY, exclude)

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
