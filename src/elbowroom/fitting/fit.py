"""``fit``: a budget in bytes for any model. Its first steps are profiled, then a plan is in force.

Nothing in the training loop changes. What ``fit`` learns it learns from the forward of the model: the first step of
each kind (see ``steps``) trains for real in the most frugal way, proved and profiled region by region; from the next
one on each region call does what the plan says. A measured peak above the budget tightens the plan, and says so once.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn import Module

from elbowroom.core.checkpoint import around_of, bare, surround, unwrap, wrap, wrapped_region
from elbowroom.core.region import Order, Region
from elbowroom.errors import InfeasibleBudgetError, PlanMismatchError, UsageError
from elbowroom.fitting.calibration import calibrate
from elbowroom.fitting.devices import parse_budget
from elbowroom.fitting.memory import resting_bytes
from elbowroom.fitting.optimizers import OptimizerWatch
from elbowroom.fitting.planned import Planned, now
from elbowroom.fitting.regions import describe_regions, find_regions
from elbowroom.fitting.steps import Kind, Step, has_gradients, model_digest, signature_of
from elbowroom.fitting.translation import step_profile
from elbowroom.fitting.watching import StepWatch
from elbowroom.planning.plan import Plan
from elbowroom.planning.profile import StepProfile
from elbowroom.units import format_bytes

M = TypeVar("M", bound=Module)

#: Kinds of steps remembered, each with its profile and plan; the longest unused is forgotten.
MAX_KINDS = 16

#: Steps watched in vain for a kind that was seen once, before it is left to the plans of others.
MAX_ATTEMPTS = 4

_FRUGAL = Order()


def fit(
    model: M,
    budget: int | str | None = None,
    *,
    regions: Any = None,
    plan: Plan | str | Path | None = None,
    verify: str = "first",
) -> M:
    """The same model object, training within ``budget`` from its second step on. Nothing else changes.

    The first step of each new kind (shapes, modes) keeps as little as possible, proves that replays equal the original
    bit for bit, and profiles. Then the plan with the least extra time under the budget is in force. Gradients are those
    of plain autograd bit for bit, in every step.

    Args:
        model: any module whose forward makes the loss or what the loss is made of.
        budget: the highest number of bytes of one whole training step: parameters, gradients, optimizer state and
            everything else of this process on the model's device included. Bytes, ``"20GiB"``, ``"85%"`` (of the
            device), or ``"max"`` (what the device has, less a margin).
        regions: what is checkpointed, each on its own: types, qualified names or globs; None: the outermost repeated
            blocks.
        plan: a plan made before (or its ``plan.json``), used as it is; its budget is the budget.
        verify: as for ``checkpoint``.

    Raises:
        UsageError: a budget or regions that mean nothing. TypeError: not a module.
        InfeasibleBudgetError: in the forward of the first step that no plan keeps under the budget; in the very first
            one if what rests alone is above it.
        PlanMismatchError: in the first forward, if ``plan`` was made for another model or other shapes; in the second,
            if the regions ran other operators than the plan knows.
    """
    if not isinstance(model, Module):
        raise TypeError(f"fit(model, budget) needs an nn.Module, got {type(model).__name__}")
    if (budget is None) == (plan is None):
        raise UsageError("fit(model, budget=...) needs a budget (or a plan, which has one), and not both")
    if plan is not None and not isinstance(plan, Plan):
        plan = _read_plan(Path(plan))
    unfit(model)
    chosen = find_regions(model, regions)
    device = _device_of(model)
    budget_bytes = plan.budget_bytes if plan is not None else parse_budget(budget, device)  # type: ignore[arg-type]
    for module in chosen.values():
        wrap(module, verify=verify)
    surround(model, Fitting(budget_bytes, tuple(chosen), plan, describe_regions(chosen, model)))
    return model


def unfit(model: M) -> M:
    """The same model object as it was before ``fit``; a model that is not fitted stays as it is."""
    fitting = fitting_of(model)
    if fitting is not None:
        fitting.let_go()
        bare(model)
        for name in fitting.names:
            unwrap(model.get_submodule(name))
    return model


def plan(model: Module) -> Plan | None:
    """The plan in force (of the step that ran last); None before there is one. Raises UsageError if not fitted."""
    found = fitted(model).last
    return None if found is None else found.plan


def profile(model: Module) -> StepProfile | None:
    """What the planner knows of the step that ran last; None before one was profiled.

    Raises UsageError if the model is not fitted.
    """
    fitting = fitted(model)
    fitting.catch_up()
    if fitting.last is None:
        return None
    return now(fitting.last.profile, fitting.resting_bytes, fitting.optimizer.transient_bytes)


def fitting_of(model: Module) -> Fitting | None:
    around = around_of(model) if isinstance(model, Module) else None
    return around if isinstance(around, Fitting) else None


def fitted(model: Module) -> Fitting:
    """What ``fit`` knows of ``model``. Raises UsageError if it is not fitted."""
    fitting = fitting_of(model)
    if fitting is None:
        raise UsageError(f"this {type(model).__name__} is not fitted: call elbowroom.fit(model, budget=...) first")
    return fitting


def _read_plan(path: Path) -> Plan:
    try:
        return Plan.from_json(path.read_text())
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"plan {path}: cannot be read as a plan: {error}") from error


def _device_of(model: Module) -> torch.device:
    devices = [p.device for p in model.parameters()]
    if not devices:
        raise UsageError("fit needs a model with parameters: without any there is nothing to train")
    return max(set(devices), key=devices.count)


class Fitting:
    """What ``fit`` knows of one model; around its forward, and the conductor of its regions."""

    def __init__(self, budget_bytes: int, names: tuple[str, ...], given: Plan | None, described: str) -> None:
        self.budget_bytes = budget_bytes
        self.names = names
        self.given = given
        self.described = described  # the regions, in words
        self.kinds: OrderedDict[Kind, Planned] = OrderedDict()
        self.last: Planned | None = None
        self.device = torch.device("cpu")
        self.optimizer = OptimizerWatch()
        self.resting_bytes = 0
        self._attempts: dict[Kind, int] = {}  # kinds seen, but not yet profiled
        self._vain: dict[Kind, int] = {}  # steps that began like this and could not be profiled
        self._step: Step | None = None
        self._now: Planned | None = None  # whose plan the step at hand follows
        self._watch: StepWatch | None = None
        self._model: Any = None  # weak reference, once attached
        self._regions: dict[int, str] = {}  # their names, by the module's identity
        self._modules: list[weakref.ref[Module]] = []
        self._digest = ""
        self._thread = 0
        self._warned = False
        self._after_failure = False  # the last backward raised: what it left behind weighs on this step

    # Copies begin anew: what was profiled is of the original's tensors.

    def __deepcopy__(self, memo: Any) -> Fitting:
        return self.__copy__()

    def __copy__(self) -> Fitting:
        return Fitting(self.budget_bytes, self.names, self.given, self.described)

    def __reduce__(self) -> Any:
        return Fitting, (self.budget_bytes, self.names, self.given, self.described)

    # Around the forward of the model ------------------------------------------------------------------------------

    def run(self, model: Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _trains():
            if torch._C._current_graph_task_id() == -1:
                self.catch_up()
            return fn(*args, **kwargs)
        step = self._step
        if step is not None and (step.in_forward or self._thread != threading.get_ident()):
            return fn(*args, **kwargs)
        self._attach(model)
        signature = signature_of(model, args, kwargs)
        self.catch_up()
        if self._step is None:
            self._open(model, signature)
        else:
            self._continue(signature)
        step = self._step
        assert step is not None
        step.in_forward = True
        try:
            out = fn(*args, **kwargs)
        except BaseException:
            self.let_go()
            raise
        finally:
            step.in_forward = False
        step.watch_graph(out)
        return out

    def order(self, region: Region) -> Order:
        """How the next region call of the step at hand is to run."""
        step = self._step
        if step is None or not step.in_forward or self._thread != threading.get_ident():
            return _FRUGAL
        name = self._regions.get(id(region.module()), region.name)
        number = step.n_regions_called
        step.n_regions_called += 1
        if self._now is not None:
            return self._now.order(number, name)
        return _FRUGAL if self._watch is None else Order(watch=self._watch.call(name))

    # Steps --------------------------------------------------------------------------------------------------------

    def _attach(self, model: Module) -> None:
        if self._model is not None and self._model() is model:
            self._conduct()
            return
        self._model = weakref.ref(model)
        self._thread = threading.get_ident()
        self.device = _device_of(model)
        modules = {name: model.get_submodule(name) for name in self.names}
        self._digest = model_digest(model, modules)
        self._regions = {id(module): name or type(module).__name__ for name, module in modules.items()}
        self._modules = [weakref.ref(module) for module in modules.values()]
        self._conduct()

    def _conduct(self) -> None:
        """The regions ask us. A shallow copy of the model shares them: its ``Fitting`` may have come between."""
        for module in self._modules:
            region = wrapped_region(module()) if module() is not None else None  # type: ignore[arg-type]
            if region is not None:
                region.conductor = self

    def _open(self, model: Module, signature: str) -> None:
        """A step begins: watch it, or put a plan in force for it."""
        self._thread = threading.get_ident()
        if self.given is not None and not self.kinds:
            self._check_given(signature)
        step = Step(has_gradients(model))
        step.calls = (signature,)
        self._now = self._watch = None
        known = self._known(step)
        wanted = known is None or any(k.begins_like(step.calls, step.gradients) for k in self._attempts)
        wanted = wanted and self._vain.get(step.kind, 0) < MAX_ATTEMPTS
        if wanted:
            calibrate()
        if wanted or (known is not None and known.is_to_be_measured(self.device)):
            self._watch = StepWatch.started(self.device)
        has_changed = self.optimizer.changed_what_rests(model)
        if self._watch is not None and self._watch.resting_bytes is not None:
            self.resting_bytes = self._watch.resting_bytes
        elif has_changed:
            self.resting_bytes = resting_bytes(self.device)
        if self.resting_bytes > self.budget_bytes and self.given is None:
            self._drop_watch()
            raise InfeasibleBudgetError(self.budget_bytes, self.resting_bytes, "what is there before the step begins")
        if not wanted and known is not None:
            try:
                known.prepare(self.budget_bytes, self.resting_bytes, self.optimizer.transient_bytes)
            except BaseException:
                self._drop_watch()
                raise
            self._now = self.last = known
            self.kinds.move_to_end(known.kind)
        step.when_backward_ends = self._backward_ended
        step.when_backward_is_gone = self._backward_is_gone
        self._step = step

    def _continue(self, signature: str) -> None:
        """Another forward before the backward: perhaps a kind that only now can be told."""
        step = self._step
        assert step is not None
        step.calls = (*step.calls, signature)
        if self._now is not None and not self._now.kind.begins_like(step.calls, step.gradients):
            other = self._known(step)
            if other is not None:
                self._now = other
                step.is_mixed = True

    def _known(self, step: Step) -> Planned | None:
        """The plan for a step that began like this: of the kind that followed the last one, else of the heaviest."""
        fitting = [p for k, p in self.kinds.items() if k.begins_like(step.calls, step.gradients)]
        if self.last is not None and self.last.is_followed_for_sure:
            for planned in fitting:
                if planned.kind == self.last.followed_by:
                    return planned
        return max(fitting, key=lambda p: len(p.kind.calls), default=None)

    def _backward_ended(self) -> None:
        if self._watch is not None:
            self._watch.backward_ended()
            self.optimizer.await_step(self._model, self._watch)

    def _backward_is_gone(self) -> None:
        """Whatever comes now, perhaps under somebody's profiler, is not ours to watch."""
        if self._watch is not None:
            self._watch.stop()

    def catch_up(self) -> None:
        """If the step at hand is over, draw the conclusions from it."""
        step = self._step
        if step is None or not step.is_over or step.in_forward:
            return
        self._step = None
        watch, now = self._watch, self._now
        self._watch = self._now = None
        self.optimizer.stop_waiting()
        if watch is not None:
            watch.stop()
        after_failure, self._after_failure = self._after_failure, step.has_failed
        if not step.is_whole or after_failure:
            return
        kind = step.kind
        if self.last is not None:
            self.last.note_follower(kind)
        if now is None and watch is not None:
            begun_like = Kind(kind.calls[:1], kind.gradients)
            learned = self._learn(kind, watch)
            self._vain[begun_like] = 0 if learned else self._vain.get(begun_like, 0) + 1
        elif now is not None and kind == now.kind and not step.is_mixed:
            self._compare(now, step, watch)
        elif kind not in self.kinds:
            self._attempts[kind] = 0
        if now is None:
            self._count_attempts()

    def _learn(self, kind: Kind, watch: StepWatch) -> bool:
        """Whether the step could be profiled. If not, training goes on in the frugal way."""
        try:
            found = step_profile(watch, f"{self._digest}-{kind.calls[0]}", calibrate())
        except Exception as error:  # ours, and no reason to end somebody's training
            self._warn(
                f"profiling a step failed ({type(error).__name__}: {error}); steps of this kind keep nothing. "
                f"Gradients stay right. Please report this."
            )
            return False
        if found is None:
            return False
        if kind in self.kinds:
            return True
        self.resting_bytes = max(self.resting_bytes, found.resting_bytes)
        self._attempts.pop(kind, None)
        roots = {c.program: watch.calls[i].program.root for i, c in enumerate(found.calls)}  # type: ignore[union-attr]
        planned = Planned(kind, found, roots)
        if self.given is not None and self.last is None:
            planned.adopt(self.given)
        self.kinds[kind] = self.last = planned
        while len(self.kinds) > MAX_KINDS:
            self.kinds.popitem(last=False)
        return True

    def _compare(self, now: Planned, step: Step, watch: StepWatch | None) -> None:
        measured_bytes = None
        if watch is not None and watch.is_resolved:
            highest_bytes = max(watch.peak_bytes, watch.end_bytes + self.optimizer.last_peak_bytes)
            measured_bytes = (watch.resting_bytes or 0) + highest_bytes
        over_bytes = now.note(step, measured_bytes, self.budget_bytes)
        if over_bytes > 0:
            then = "the plan was given, and stays" if now.is_given else "the plan is tightened by that"
            self._warn(
                f"a step took {format_bytes(self.budget_bytes + over_bytes)}, which is {format_bytes(over_bytes)} "
                f"above the budget of {format_bytes(self.budget_bytes)}; {then}. This is said once."
            )

    def _warn(self, text: str) -> None:
        """Once a model."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"elbowroom: {text}", RuntimeWarning, stacklevel=6)

    def _count_attempts(self) -> None:
        for kind in list(self._attempts):
            self._attempts[kind] += 1
            if self._attempts[kind] > MAX_ATTEMPTS:
                del self._attempts[kind]

    def _check_given(self, signature: str) -> None:
        assert self.given is not None
        found = f"{self._digest}-{signature}"
        if self.given.fingerprint != found:
            what = "model" if self.given.fingerprint.split("-")[0] != self._digest else "shape of the inputs"
            raise PlanMismatchError(self.given.fingerprint, found, what)

    def _drop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._watch = None

    def let_go(self) -> None:
        """Forget the step at hand: it failed, or nobody wants to know."""
        self._drop_watch()
        self.optimizer.stop_waiting()
        self._step = self._now = None


def _trains() -> bool:
    """Whether a forward now is part of a training step."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    if torch._C._current_graph_task_id() != -1:
        return False  # somebody's checkpoint runs the model again, in its backward
    return torch._C._functorch.peek_interpreter_stack() is None and torch._C._get_tracing_state() is None
