"""From the log of a step to its profile: programs and moments, with the tape bytes of that step taken off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from elbowroom.core.program import MADE, OPAQUE, PARAMETER, SOURCE, Program
from elbowroom.fitting import watching
from elbowroom.fitting.calibration import Calibration
from elbowroom.fitting.watching import Call, Entry, StepWatch
from elbowroom.planning import profile as numbers
from elbowroom.planning.profile import (
    ASK,
    BACKWARD,
    FORWARD,
    GAP,
    RELEASE,
    BackwardEvent,
    CallProfile,
    EngineCosts,
    Moment,
    OperatorProfile,
    ProgramProfile,
    StepProfile,
    ValueProfile,
    digest_of,
)
from elbowroom.planning.tapes import Interpreter

HEAD = "head and loss"
AFTER = "backward is over"

_FREE = EngineCosts(0.0, 0.0, 0.0)
_KINDS = {MADE: numbers.MADE, OPAQUE: numbers.OPAQUE, PARAMETER: numbers.PARAMETER, SOURCE: numbers.SOURCE}


def step_profile(watch: StepWatch, fingerprint: str, calibration: Calibration) -> StepProfile | None:
    """The profile of a watched step; None if a part of it is missing (a region that failed, no backward)."""
    resting_bytes = watch.resting_bytes
    if not watch.is_resolved or resting_bytes is None:
        return None
    if not watch.calls or any(call.program is None for call in watch.calls):
        return None
    grouping = _group(watch, calibration)
    tape_bytes = _tape_bytes(watch, grouping)
    programs = tuple(_with_events(watch, grouping, i, tape_bytes) for i in range(len(grouping.programs)))
    return StepProfile(
        fingerprint=fingerprint,
        device=str(watch.meter.device),
        resting_bytes=resting_bytes,
        programs=programs,
        calls=_calls(watch, grouping),
        moments=tuple(_moments(watch, grouping, tape_bytes)),
        costs=calibration.costs,
    )


def program_digest(program: Program) -> str:
    """Equal for programs with the same operators, wiring, values and slots, in any process."""
    ops = [(str(op.func), op.reads, op.outputs, op.writes) for op in program.ops]
    values = [(v.kind, v.maker, v.nbytes, str(v.geometry)) for v in program.values]
    return digest_of((ops, values, [(s.bound, s.dead != "", str(s.geometry)) for s in program.slots]))


# Programs ------------------------------------------------------------------------------------------------------------


@dataclass
class _Grouping:
    """Which calls share a program profile, and what backward did to each call: (kind, slot, index in the log)."""

    programs: list[ProgramProfile]  # without their events' bytes and seconds
    kept: list[frozenset[int]]  # what the profiled step kept of each
    of_call: list[int]
    happened: list[list[tuple[str, int, int]]]
    early: list[frozenset[int]]  # slots that autograd dropped before the region had ended


def _group(watch: StepWatch, calibration: Calibration) -> _Grouping:
    happened, early = _what_happened(watch)
    times = _operator_times(watch)
    grouping = _Grouping([], [], [], happened, early)
    index: dict[tuple[object, ...], int] = {}
    for c, call in enumerate(watch.calls):
        assert call.program is not None
        digest = program_digest(call.program)
        sequence = tuple((kind, slot) for kind, slot, _ in happened[c])
        key = (digest, call.free, early[c], sequence)
        if key not in index:
            index[key] = len(grouping.programs)
            grouping.programs.append(_program_profile(call, digest, early[c], sequence, times[digest], calibration))
            grouping.kept.append(call.program.keeps)
        grouping.of_call.append(index[key])
    return grouping


def _what_happened(watch: StepWatch) -> tuple[list[list[tuple[str, int, int]]], list[frozenset[int]]]:
    happened: list[list[tuple[str, int, int]]] = [[] for _ in watch.calls]
    early: list[set[int]] = [set() for _ in watch.calls]
    ended: set[int] = set()
    for i, entry in enumerate(watch.log):
        if entry.kind == watching.RETURNED:
            ended.add(entry.call)
        elif entry.kind == watching.ASK:
            happened[entry.call].append((ASK, entry.item, i))
        elif entry.kind == watching.RELEASED:
            if entry.call in ended:
                happened[entry.call].append((RELEASE, entry.item, i))
            else:
                early[entry.call].add(entry.item)
    return happened, [frozenset(slots) for slots in early]


def _operator_times(watch: StepWatch) -> dict[str, dict[int, tuple[float, int]]]:
    """By program digest and operator: the median of its seconds over all calls, and the most bytes it took at once."""
    samples: dict[str, dict[int, list[tuple[float, int]]]] = {}
    digests = [program_digest(call.program) for call in watch.calls if call.program is not None]
    begun: Entry | None = None
    for entry in watch.log:
        if entry.kind == watching.OPERATOR:
            begun = entry
        elif entry.kind == watching.OPERATOR_END and begun is not None:
            segment = watch.segments[begun.mark]
            of_program = samples.setdefault(digests[entry.call], {})
            of_program.setdefault(entry.item, []).append(
                (entry.arrived_s - begun.left_s, segment.peak_bytes - segment.level_bytes)
            )
            begun = None
    found: dict[str, dict[int, tuple[float, int]]] = {digest: {} for digest in digests}
    for digest, of_program in samples.items():
        for k, rows in of_program.items():
            found[digest][k] = (median(seconds for seconds, _ in rows), max(n_bytes for _, n_bytes in rows))
    return found


def _program_profile(
    call: Call, digest: str, early: frozenset[int], sequence: Sequence[tuple[str, int]],
    times: dict[int, tuple[float, int]], calibration: Calibration,
) -> ProgramProfile:  # fmt: skip
    program = call.program
    assert program is not None
    operators = []
    for k, op in enumerate(program.ops):
        outputs = tuple(v for v in op.outputs if v >= 0)
        seconds, peak_bytes = times.get(k, (0.0, 0))
        transient_bytes = max(0, peak_bytes - sum(program.values[v].nbytes for v in outputs))
        operators.append(
            OperatorProfile(str(op.func), op.reads, outputs, op.writes, seconds, transient_bytes, op.module, op.line)
        )
    values = tuple(
        ValueProfile(
            _KINDS[v.kind], v.maker,
            0 if v.kind == PARAMETER or i in call.free or v.geometry is None else v.nbytes,
            v.label or v.name or "",
        )
        for i, v in enumerate(program.values)
    )  # fmt: skip
    slots = tuple(-1 if s.dead or i in early else s.bound for i, s in enumerate(program.slots))
    events = tuple(BackwardEvent(kind, slot, 0, 0, 0.0) for kind, slot in sequence)
    forward_s = sum(op.seconds for op in operators) + len(operators) * calibration.plain_s
    return ProgramProfile(digest, program.region, tuple(operators), values, slots, events, forward_s)


def _with_events(watch: StepWatch, grouping: _Grouping, index: int, tape_bytes: _TapeBytes) -> ProgramProfile:
    """The program with what was measured at its events: the highest bytes and the median seconds over its calls."""
    program = grouping.programs[index]
    calls = [c for c, of in enumerate(grouping.of_call) if of == index]
    rows: list[list[tuple[int, int, float]]] = [[] for _ in program.events]
    for c in calls:
        begin_bytes = 0
        last = len(program.events) - 1
        for e, (kind, _, i) in enumerate(grouping.happened[c]):
            level_bytes = watch.segments[watch.log[i].mark].level_bytes - tape_bytes.at[i]
            if e == 0:
                begin_bytes = level_bytes
            if kind == ASK:
                i = _index_of_got(watch, i)
            after = watch.log[i]
            # After the last release comes what belongs to the rest of the step.
            is_end = e == last and kind == RELEASE
            peak_bytes = level_bytes if is_end else watch.segments[after.mark].peak_bytes - tape_bytes.at[i]
            seconds = 0.0 if is_end else max(0.0, watch.log[i + 1].arrived_s - after.left_s)
            rows[e].append((level_bytes - begin_bytes, peak_bytes - begin_bytes, seconds))
    events = tuple(
        BackwardEvent(
            event.kind, event.slot, max(r[0] for r in row), max(r[1] for r in row), median(r[2] for r in row)
        )
        for event, row in zip(program.events, rows, strict=True)
    )  # fmt: skip
    return replace(program, events=events)


def _index_of_got(watch: StepWatch, ask: int) -> int:
    """Where in the log the value asked for was there; the ask itself if it failed."""
    entry = watch.log[ask]
    for i in range(ask + 1, len(watch.log)):
        found = watch.log[i]
        if found.kind == watching.GOT and (found.call, found.item) == (entry.call, entry.item):
            return i
    return ask


# Bytes of the tapes --------------------------------------------------------------------------------------------------


@dataclass
class _TapeBytes:
    """What all live tapes held right after each entry of the log (right before it, for an ask)."""

    at: list[int]


def _tape_bytes(watch: StepWatch, grouping: _Grouping) -> _TapeBytes:
    machines = [Interpreter(p, _FREE) for p in grouping.programs]
    runs = [machine.run(kept) for machine, kept in zip(machines, grouping.kept, strict=True)]
    shared = [dict(call.storages) for call in _calls(watch, grouping)]
    holders: dict[int, set[int]] = {}
    own = [0] * len(watch.calls)
    done = [0] * len(watch.calls)
    total = twice = 0
    at = []

    def now_holds(c: int, n_bytes: int, held: int) -> None:
        nonlocal total, twice
        total += n_bytes - own[c]
        own[c] = n_bytes
        for v, storage in shared[c].items():
            calls = holders.setdefault(storage, set())
            before = len(calls)
            calls.add(c) if held >> v & 1 else calls.discard(c)
            nbytes = grouping.programs[grouping.of_call[c]].values[v].nbytes
            twice += (max(1, len(calls)) - max(1, before)) * nbytes

    for entry in watch.log:
        c = entry.call
        if entry.kind == watching.RETURNED:
            run = runs[grouping.of_call[c]]
            now_holds(c, run.kept_bytes, run.held)
        elif entry.kind == watching.GOT or (entry.kind == watching.RELEASED and entry.item not in grouping.early[c]):
            passage = runs[grouping.of_call[c]].course[done[c]]
            now_holds(c, passage.after_bytes, passage.held)
            done[c] += 1
        at.append(total - twice)
    return _TapeBytes(at)


# The step ------------------------------------------------------------------------------------------------------------


def _calls(watch: StepWatch, grouping: _Grouping) -> tuple[CallProfile, ...]:
    """Calls, and the storages that one made and others read: pinned while the log ran, so an address is an identity."""
    known: dict[int, list[tuple[int, int]]] = {}
    for c, call in enumerate(watch.calls):
        for v in call.alive:
            known.setdefault(call.storages[v], []).append((c, v))
    ids: list[list[tuple[int, int]]] = [[] for _ in watch.calls]
    shared = [uses for uses in known.values() if len({c for c, _ in uses}) > 1]
    for number, uses in enumerate(shared):
        for c, v in uses:
            ids[c].append((v, number))
    return tuple(
        CallProfile(call.region, grouping.of_call[c], tuple(sorted(ids[c]))) for c, call in enumerate(watch.calls)
    )


def _moments(watch: StepWatch, grouping: _Grouping, tape_bytes: _TapeBytes) -> Iterator[Moment]:
    """Forwards and backwards of the calls, and the gaps between them."""
    first = {events[0][2]: c for c, events in enumerate(grouping.happened) if events}
    last = {events[-1][2]: c for c, events in enumerate(grouping.happened) if events}
    last = {(_index_of_got(watch, i) if watch.log[i].kind == watching.ASK else i): c for i, c in last.items()}
    busy: set[int] = set()
    open_since = 0
    was_forward = False

    def level(i: int) -> int:
        return watch.segments[watch.log[i].mark].level_bytes - tape_bytes.at[i]

    def gap(end: int, label: str = "") -> Iterator[Moment]:
        if end > open_since:
            entries = range(open_since, end)
            peak_bytes = max(watch.segments[watch.log[i].mark].peak_bytes - tape_bytes.at[i] for i in entries)
            seconds = sum(watch.log[i + 1].arrived_s - watch.log[i].left_s for i in entries)
            yield Moment(GAP, -1, level(open_since), peak_bytes, seconds, label)

    for i, entry in enumerate(watch.log):
        if entry.kind == watching.BEGIN or i in first:
            if not busy:
                yield from gap(i, HEAD if was_forward and i in first else "")
            yield Moment(FORWARD if entry.kind == watching.BEGIN else BACKWARD, entry.call, level(i), 0, 0.0)
            busy.add(entry.call)
        if entry.kind == watching.RETURNED or i in last:
            busy.discard(entry.call)
            open_since, was_forward = i, entry.kind == watching.RETURNED
        elif entry.kind == watching.BACKWARD_END:
            if not busy:
                yield from gap(i, HEAD if was_forward else "")
            yield Moment(GAP, -1, level(i), level(i), 0.0, AFTER)
