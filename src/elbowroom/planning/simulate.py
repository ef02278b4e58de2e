"""The planner's judge: walks a step under a plan, moment by moment, and says bytes, seconds and where the peak is.

It knows nothing of the solver. The calls of the step, each interpreted by ``tapes``, follow one another in the order of
the profile's moments:

    bytes at a moment = resting + base (measured, in the profile) + what the live tapes hold (worked out)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from elbowroom.planning.profile import BACKWARD, FORWARD, GAP, EngineCosts, Moment, ProgramProfile, StepProfile
from elbowroom.planning.tapes import CallRun, Interpreter

# Nouns ---------------------------------------------------------------------------------------------------------------


class Decided(Protocol):
    """What has been decided for one region call: ``plan.Decision``, ``options.Option`` and ``Choice`` all say it."""

    @property
    def plain(self) -> bool: ...

    @property
    def keep(self) -> Iterable[int]: ...


@dataclass(frozen=True)
class Choice:
    """A bare decision: run plain, or record and keep the values of ``keep``."""

    plain: bool
    keep: frozenset[int] = frozenset()


class Point(NamedTuple):
    """Bytes of the whole step at one moment; ``label`` says what goes on."""

    seconds: float
    nbytes: int
    label: str


@dataclass(frozen=True)
class Simulation:
    """A step under a plan. ``peak_bytes`` includes what rests; ``moment_peaks`` has the highest of each moment."""

    peak_bytes: int
    where: str
    step_s: float
    moment_peaks: tuple[int, ...]
    timeline: tuple[Point, ...]


# Public verbs --------------------------------------------------------------------------------------------------------


def run_call(program: ProgramProfile, keep: Iterable[int] | None, costs: EngineCosts) -> CallRun:
    """One call of ``program`` that keeps the values of ``keep``; None: a plain call, without recording."""
    return Interpreter(program, costs).run(keep)


def simulate(step: StepProfile, decisions: Sequence[Decided]) -> Simulation:
    """The step under one decision for each of its calls, in their order."""
    return Simulator(step).run(decisions)


# The whole step ------------------------------------------------------------------------------------------------------


class Simulator:
    """Walks one step under any decisions, and remembers what it worked out about its programs."""

    def __init__(self, step: StepProfile) -> None:
        self.step = step
        self._machines = [Interpreter(program, step.costs) for program in step.programs]
        self._runs: dict[tuple[int, frozenset[int] | None], CallRun] = {}

    def call_run(self, call: int, decided: Decided) -> CallRun:
        """The step's call number ``call`` under a decision."""
        program = self.step.calls[call].program
        keep = None if decided.plain else frozenset(decided.keep)
        run = self._runs.get((program, keep))
        if run is None:
            run = self._runs[program, keep] = self._machines[program].run(keep)
        return run

    def run(self, decisions: Sequence[Decided], *, timeline: bool = True) -> Simulation:
        """The step under one decision for each call; without ``timeline`` that stays empty, which is faster.

        ``step_s`` is that of the plain step plus ``extra_s`` of every call, whether its backward is in the step or not.
        Raises ValueError if there are more or fewer decisions than calls.
        """
        if len(decisions) != len(self.step.calls):
            raise ValueError(
                f"a plan for {len(decisions)} region calls, but the step has {len(self.step.calls)}: give one "
                f"decision for each call of the profile, in its order"
            )
        runs = [self.call_run(j, d) for j, d in enumerate(decisions)]
        walk = _Walk(self.step, runs, draws=timeline)
        peaks = []
        for i, moment in enumerate(self.step.moments):
            walk.begin(moment)
            if moment.kind == FORWARD:
                walk.forward(moment)
            elif moment.kind == BACKWARD:
                walk.backward(moment, self._machines[self.step.calls[moment.call].program].run_s)
            else:
                walk.gap(moment, gap_in_words(self.step, i))
            peaks.append(walk.moment_peak)
        step_s = self.step.plain_s + sum(run.extra_s for run in runs)
        return Simulation(walk.peak_bytes, walk.where, step_s, tuple(peaks), tuple(walk.points))


def gap_in_words(step: StepProfile, index: int) -> str:
    """Where the step's gap number ``index`` of its moments is: between which parts of which calls, and its label."""

    def nearest(moments: Iterable[Moment]) -> Moment | None:
        return next((m for m in moments if m.kind != GAP), None)

    def named(moment: Moment) -> str:
        return f"{step.calls[moment.call].region}'s {moment.kind}"

    before, after = nearest(reversed(step.moments[:index])), nearest(step.moments[index + 1 :])
    label = f" ({step.moments[index].label})" if step.moments[index].label else ""
    if before is None:
        return f"before {named(after)}{label}" if after is not None else f"the step{label}"
    if after is None:
        return f"after {named(before)}{label}"
    if before.call == after.call:
        return f"between {step.calls[before.call].region}'s forward and its backward{label}"
    return f"between {named(before)} and {named(after)}{label}"


class _Walk:
    """One walk over a step: which tapes live, how many bytes there are, what the highest was so far.

    Of a storage that several tapes hold, each under its own value, the bytes count once (``CallProfile.storages``).
    """

    def __init__(self, step: StepProfile, runs: Sequence[CallRun], *, draws: bool) -> None:
        self.step = step
        self.runs = runs
        self.draws = draws
        self.peak_bytes = 0
        self.where = ""
        self.moment_peak = 0
        self.now_s = 0.0
        self.points: list[Point] = []
        self._apart: dict[int, int] = {}  # call -> bytes of its tape that no other call can hold
        self._holders: dict[int, dict[int, int]] = {}  # storage -> call whose tape holds it -> bytes
        self._tapes_bytes = 0  # of all tapes but that of a running backward

    def begin(self, moment: Moment) -> None:
        self.moment_peak = 0
        self._base_bytes = self.step.resting_bytes + moment.level_bytes

    def forward(self, moment: Moment) -> None:
        """A call's forward, at the end of which its tape is there."""
        region, program = self.step.calls[moment.call].region, self.step.program_of(moment.call)
        run = self.runs[moment.call]
        there = self._base_bytes + self._tapes_bytes
        self._note(there, f"forward of {region}")
        whole_s = sum(op.seconds for op in program.operators)
        stretch = (program.forward_s + run.recording_s) / whole_s if whole_s else 0.0
        for op, nbytes in zip(program.operators, run.forward, strict=True):
            self._note(there + nbytes, f"forward of {region}, running {op.name}")
            self.now_s += op.seconds * stretch
        if not whole_s:
            self.now_s += program.forward_s + run.recording_s
        self._put(moment.call, run.held, run.kept_bytes)

    def backward(self, moment: Moment, run_s: Sequence[float]) -> None:
        """A call's backward; ``run_s`` are the seconds of replaying each of its operators."""
        call = moment.call
        program, run = self.step.program_of(call), self.runs[call]
        self._take(call)
        there = self._base_bytes + self._tapes_bytes
        held, nbytes = run.held, run.kept_bytes
        label = f"backward of {self.step.calls[call].region}"
        self._note(there + nbytes + self._shared(call, held), label)
        for event, passage in zip(program.events, run.course, strict=True):
            before = there + event.level_bytes + self._shared(call, held)
            self._note(before + passage.before_bytes, label)
            for k, highest in passage.sweep:
                self._note(before + highest, f"{label}, replaying {program.operators[k].name}")
                self.now_s += run_s[k]
            held = passage.held
            self._note(there + event.peak_bytes + passage.after_bytes + self._shared(call, held), label)
            self.now_s += event.seconds
        if run.left_bytes:
            self._put(call, held, run.left_bytes)

    def gap(self, moment: Moment, label: str) -> None:
        """What came between two calls, or after them."""
        self._note(self._base_bytes + self._tapes_bytes, label)
        self._note(self.step.resting_bytes + moment.peak_bytes + self._tapes_bytes, label)
        self.now_s += moment.seconds

    def _note(self, nbytes: int, label: str) -> None:
        self.moment_peak = max(self.moment_peak, nbytes)
        if nbytes > self.peak_bytes or not self.where:
            self.peak_bytes, self.where = nbytes, label
        if self.draws:
            self.points.append(Point(self.now_s, nbytes, label))

    # Storages that several tapes hold ---------------------------------------------------------------------------------

    def _own(self, call: int, held: int) -> dict[int, int]:
        """Storages that others may hold, too, among the ``held`` values of a call: their bytes."""
        values = self.step.program_of(call).values
        own: dict[int, int] = {}
        for v, storage in self.step.calls[call].storages:
            if held >> v & 1:
                own[storage] = max(own.get(storage, 0), values[v].nbytes)
        return own

    def _doubled(self, call: int, held: int) -> int:
        values = self.step.program_of(call).values
        return sum(values[v].nbytes for v, _ in self.step.calls[call].storages if held >> v & 1)

    def _shared(self, call: int, held: int) -> int:
        """What to add to a tape's bytes, so that what other tapes hold counts once; not above 0."""
        own = self._own(call, held)
        if not own:
            return 0
        beyond = sum(
            max(0, nbytes - max(self._holders.get(storage, {}).values(), default=0)) for storage, nbytes in own.items()
        )
        return beyond - self._doubled(call, held)

    def _put(self, call: int, held: int, nbytes: int) -> None:
        self._tapes_bytes += nbytes + self._shared(call, held)
        self._apart[call] = nbytes - self._doubled(call, held)
        for storage, size in self._own(call, held).items():
            self._holders.setdefault(storage, {})[call] = size

    def _take(self, call: int) -> None:
        self._tapes_bytes -= self._apart.pop(call, 0)
        for holders in self._holders.values():
            size = holders.pop(call, None)
            if size is not None:
                self._tapes_bytes -= max(0, size - max(holders.values(), default=0))
