"""The simulator: exact numbers by hand, and any step against a slow walk that adds up sets of storages."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.planning.profile import (
    ASK,
    BACKWARD,
    FORWARD,
    GAP,
    MADE,
    OPAQUE,
    PARAMETER,
    RELEASE,
    SOURCE,
    BackwardEvent,
    CallProfile,
    EngineCosts,
    Moment,
    OperatorProfile,
    ProgramProfile,
    StepProfile,
    ValueProfile,
)
from elbowroom.planning.simulate import Choice, Simulator, run_call, simulate
from elbowroom.planning.tapes import members
from tests.planning.random_steps import COSTS, FREE, gpt_like_step, programs, steps

PLAIN = Choice(plain=True)
FRUGAL = Choice(plain=False)


def op(name: str, reads: tuple[int, ...], *outputs: int, seconds: float = 1.0, transient: int = 0) -> OperatorProfile:
    return OperatorProfile(name, reads, outputs, (), seconds, transient)


def write(name: str, old: int, new: int, *, needed: bool = True) -> OperatorProfile:
    return OperatorProfile(name, (old,) if needed else (), (), ((old, new, needed),), 1.0)


def program(
    values: list[tuple[str, int, int]], operators: list[OperatorProfile], slots: tuple[int, ...], events: str
) -> ProgramProfile:
    """``values``: (kind, maker, bytes); ``events``: such as "a1 r1 a0 r0", asks and releases of slots."""
    told = tuple(BackwardEvent(ASK if e[0] == "a" else RELEASE, int(e[1:]), 0, 0, 0.5) for e in events.split())
    made = tuple(ValueProfile(*v) for v in values)
    return ProgramProfile("digest", "block", tuple(operators), made, slots, told, 3.0)


# x -sin-> 1 -exp-> 2 -cos-> 3; sin saved x, exp saved its result, cos its input 2
CHAIN = program(
    [(SOURCE, -1, 7), (MADE, 0, 10), (MADE, 1, 100), (MADE, 2, 1000)],
    [op("sin", (0,), 1), op("exp", (1,), 2, seconds=2.0, transient=5), op("cos", (2,), 3)],
    (0, 2, 2),
    "a2 r2 a1 r1 a0 r0",
)


# One call, by hand --------------------------------------------------------------------------------------------------


def test_a_plain_call_holds_what_was_saved_slot_by_slot() -> None:
    run = run_call(CHAIN, None, COSTS)
    assert (run.kept_bytes, run.extra_s, run.replayed, run.left_bytes) == (107, 0.0, 0, 0)
    assert [passage[:3] for passage in run_call(CHAIN, None, FREE).course] == [
        (107, 107, 107), (107, 107, 107), (107, 107, 107), (107, 107, 7), (7, 7, 7), (7, 7, 0),
    ]  # fmt: skip
    assert run.forward == (10, 115, 1100)  # sin; exp with its transient, 1 still there; 2 stays, 3 is the result
    assert run.forward_bytes == 1100


def test_a_frugal_call_replays_what_leads_to_the_value_once() -> None:
    run = run_call(CHAIN, (), EngineCosts(record_s=0.1, replay_s=0.01, slot_s=0.001))
    assert (run.kept_bytes, run.replayed) == (7, 2)
    assert run.extra_s == pytest.approx(1.0 + 2.0 + 2 * 0.01 + 3 * 0.1 + 3 * 0.001)
    # sin runs: 7 + 10; exp: 7 + 10 + 100 + 5 of transient; then 1 is gone, 2 is there until its second slot lets go
    assert run.course[0].sweep == ((0, 17), (1, 122))
    assert [p[:3] for p in run.course] == [
        (7, 122, 107), (107, 107, 107), (107, 107, 107), (107, 107, 7), (7, 7, 7), (7, 7, 0),
    ]  # fmt: skip
    assert run.working_bytes == 115
    assert run.forward == (10, 115, 1100)


def test_the_result_of_a_node_is_there_until_the_node_lets_go() -> None:
    # Only slot 1 asks for value 2: it leaves the cache at once, and the node holds it until the release.
    once = program([(SOURCE, -1, 7), (MADE, 0, 10)], [op("exp", (0,), 1)], (0, 1), "a1 a0 r1 r0")
    course = [passage[:3] for passage in run_call(once, (), FREE).course]
    assert course == [(7, 17, 17), (17, 17, 17), (17, 17, 7), (7, 7, 0)]


def test_a_kept_value_is_held_only_where_something_needs_it() -> None:
    assert run_call(CHAIN, (2,), FREE).kept_bytes == 107
    assert run_call(CHAIN, (1, 2), FREE).kept_bytes == 107  # nothing is replayed from 1
    assert run_call(CHAIN, (1,), FREE).kept_bytes == 17
    assert run_call(CHAIN, (3,), FREE).kept_bytes == 7  # nobody saved the result


def test_sources_that_autograd_did_not_save_are_held_only_for_replays() -> None:
    chain = program([(SOURCE, -1, 50), (MADE, 0, 10)], [op("exp", (0,), 1)], (1,), "a0 r0")
    assert run_call(chain, (), FREE).kept_bytes == 50
    assert run_call(chain, (1,), FREE).kept_bytes == 10
    assert run_call(chain, None, FREE).kept_bytes == 10


def test_opaque_values_are_held_where_something_needs_them() -> None:
    values = [(SOURCE, -1, 7), (OPAQUE, 0, 10), (MADE, 1, 100), (OPAQUE, 2, 1000)]
    chain = program(values, [op("kernel", (0,), 1), op("exp", (1,), 2), op("kernel", (2,), 3)], (2,), "a0 r0")
    run = run_call(chain, (), FREE)
    assert (run.kept_bytes, run.replayed) == (10, 1)
    assert run_call(chain, (2,), FREE).kept_bytes == 100


def test_outputs_that_are_at_hand_are_made_again_and_dropped_at_once() -> None:
    both = program([(SOURCE, -1, 1), (MADE, 0, 10), (MADE, 0, 100)], [op("split", (0,), 1, 2)], (1, 2), "a0 r0 a1 r1")
    run = run_call(both, (2,), FREE)
    assert run.course[0] == (101, 211, 111, 0b101, ((0, 211),))  # the source is held for this replay
    assert [p.after_bytes for p in run.course] == [111, 100, 100, 0]


def test_a_kept_value_that_could_be_made_from_what_is_saved_keeps_that_reachable() -> None:
    # 1 is kept and remade from x, which was saved: x stays until the slot on 1 is gone, too, as in the engine.
    kept = program([(SOURCE, -1, 7), (MADE, 0, 10)], [op("exp", (0,), 1)], (0, 1), "a0 r0 a1 r1")
    assert [p.after_bytes for p in run_call(kept, (1,), FREE).course] == [17, 17, 17, 0]
    weight = program([(PARAMETER, -1, 0), (MADE, 0, 10)], [op("cast", (0,), 1)], (1,), "a0 r0")
    assert run_call(weight, (1,), FREE).kept_bytes == 10


def test_a_write_takes_the_old_storage_at_its_last_use_and_a_copy_before() -> None:
    values = [(SOURCE, -1, 7), (MADE, 0, 10), (MADE, 1, 10), (MADE, 2, 1)]
    ours = program(values, [op("sin", (0,), 1), write("relu_", 1, 2), op("sum", (2,), 3)], (2,), "a0 r0")
    assert run_call(ours, (), FREE).course[0].sweep == ((0, 17), (1, 17))
    assert run_call(ours, (), FREE).forward == (10, 10, 11)
    # written over a source: a replay copies, and so did the forward for the old content
    source = program(
        [(SOURCE, -1, 7), (MADE, 0, 7), (MADE, 1, 1)], [write("relu_", 0, 1), op("sum", (1,), 2)], (1,), "a0 r0"
    )
    run = run_call(source, (), FREE)
    assert (run.course[0].sweep, run.forward) == (((0, 14),), (7, 8))
    assert run_call(source, (1,), FREE).forward == (7, 8)  # 1 is the caller's storage, but the tape holds it
    # write-only: the old content is not needed, a new storage is
    fill = program(values[1:3], [op("empty", (), 0), write("fill_", 0, 1, needed=False)], (1,), "a0 r0")
    assert run_call(fill, (), FREE).course[0].sweep == ((1, 10),)


def test_the_old_content_of_a_written_value_cannot_be_kept() -> None:
    values = [(SOURCE, -1, 7), (MADE, 0, 10), (MADE, 1, 10)]
    chain = program(values, [op("sin", (0,), 1), write("relu_", 1, 2)], (2,), "a0 r0")
    assert run_call(chain, (1,), FREE) == run_call(chain, (), FREE)


def test_a_second_pass_replays_again() -> None:
    twice = program([(SOURCE, -1, 7), (MADE, 0, 10)], [op("exp", (0,), 1)], (1,), "a0 a0 r0")
    run = run_call(twice, (), FREE)
    assert run.replayed == 2
    assert [p.after_bytes for p in run.course] == [17, 17, 0]
    assert run_call(twice, None, FREE).replayed == 0
    # ... also what the first pass had cached for a slot that it never asked
    both = program([(SOURCE, -1, 7), (MADE, 0, 10)], [op("exp", (0,), 1)], (1, 1), "a0 a0 r0 a1 r1")
    run = run_call(both, (), FREE)
    assert run.replayed == 2
    assert [p[:3] for p in run.course] == [(7, 17, 17), (17, 17, 17), (17, 17, 17), (17, 17, 17), (17, 17, 0)]


def test_base_bytes_and_tape_bytes_add_up_in_the_working_set() -> None:
    events = (BackwardEvent(ASK, 0, 1000, 1000, 0.0), BackwardEvent(RELEASE, 0, 1000, 1005, 0.0))
    chain = program([(SOURCE, -1, 7), (MADE, 0, 10)], [op("exp", (0,), 1, transient=2)], (1,), "")
    with_base = ProgramProfile("", "f", chain.operators, chain.values, chain.slots, events, 1.0)
    assert run_call(with_base, (), FREE).working_bytes == 1000 + 10 + 2  # the sweep; 7 are there from the beginning on
    # kept, it is let go of before the 1005 are reached
    assert run_call(with_base, (1,), FREE).working_bytes == 1000


# A step, by hand ------------------------------------------------------------------------------------------------------


def step_of(chain: ProgramProfile, *storages: tuple[tuple[int, int], ...]) -> StepProfile:
    calls = tuple(CallProfile(f"blocks.{j}", 0, s) for j, s in enumerate(storages))
    moments = [Moment(FORWARD, j, 0, 0, 0.0) for j in range(len(calls))]
    moments.append(Moment(GAP, -1, 20, 50, 2.0, "head and loss"))
    moments += [Moment(BACKWARD, j, 30, 0, 0.0) for j in reversed(range(len(calls)))]
    return StepProfile("", "cpu", 10_000, (chain,), calls, tuple(moments), FREE)


def test_a_step_is_rest_and_base_and_tapes() -> None:
    step = step_of(CHAIN, (), ())
    plain = simulate(step, [PLAIN, PLAIN])
    assert plain.moment_peaks == (11_100, 11_207, 10_264, 10_244, 10_137)
    assert plain.peak_bytes == 11_207
    assert plain.where == "forward of blocks.1, running cos"
    assert plain.step_s == step.plain_s == 2 * (3.0 + 3.0) + 2.0
    assert plain.timeline[-1][0] == pytest.approx(plain.step_s - 0.5)  # the last point is the last event
    frugal = simulate(step, [FRUGAL, PLAIN])
    assert frugal.moment_peaks == (11_100, 11_107, 10_164, 10_144, 10_152)
    assert frugal.step_s == pytest.approx(plain.step_s + 3.0)
    assert frugal.timeline[-1][0] == pytest.approx(frugal.step_s - 0.5)


def test_where_names_the_replayed_operator_and_the_gap() -> None:
    step = step_of(program([(SOURCE, -1, 7), (MADE, 0, 100)], [op("aten.mm", (0,), 1)], (1,), "a0 r0"), ())
    assert simulate(step, [FRUGAL]).where == "backward of blocks.0, replaying aten.mm"
    assert simulate(step, [PLAIN]).where == "between blocks.0's forward and its backward (head and loss)"
    late = StepProfile("", "cpu", 0, step.programs, step.calls, (*step.moments, Moment(GAP, -1, 999, 999, 0.0)), FREE)
    assert simulate(late, [PLAIN]).where == "after blocks.0's backward"
    early = StepProfile(
        "", "cpu", 0, step.programs, step.calls, (Moment(GAP, -1, 999, 999, 0.0, "a"), *step.moments), FREE
    )
    assert simulate(early, [PLAIN]).where == "before blocks.0's forward (a)"


def test_a_storage_that_two_tapes_hold_counts_once() -> None:
    # The result of exp is saved by its own call and is the saved source of the next one.
    block = program([(SOURCE, -1, 100), (MADE, 0, 100)], [op("exp", (0,), 1)], (0, 1), "a1 r1 a0 r0")
    apart = simulate(step_of(block, (), ()), [PLAIN, PLAIN])
    shared = simulate(step_of(block, ((0, 5), (1, 6)), ((0, 6), (1, 7))), [PLAIN, PLAIN])
    assert apart.moment_peaks[2] == 10_050 + 400
    assert shared.moment_peaks[2] == 10_050 + 300
    assert shared.moment_peaks[3] == 10_030 + 300  # the second call lets go of its own first, then of the shared one
    assert shared.moment_peaks[4] == 10_030 + 200
    # What is replayed is a copy of its own.
    assert simulate(step_of(block, ((1, 6),), ((0, 6),)), [FRUGAL, FRUGAL]).moment_peaks == (
        10_100, 10_200, 10_250, 10_330, 10_230,
    )  # fmt: skip


def test_a_call_without_a_backward_keeps_its_tape() -> None:
    step = step_of(CHAIN, (), ())
    without = StepProfile("", "cpu", 10_000, step.programs, step.calls, step.moments[:-1], FREE)
    after = StepProfile(
        "", "cpu", 10_000, step.programs, step.calls, (*without.moments, Moment(GAP, -1, 0, 0, 1.0)), FREE
    )
    assert simulate(after, [PLAIN, PLAIN]).moment_peaks[-1] == 10_107
    assert simulate(after, [FRUGAL, PLAIN]).moment_peaks[-1] == 10_007


def test_slots_that_are_never_let_go_of_stay() -> None:
    chain = program([(SOURCE, -1, 7), (MADE, 0, 10)], [op("exp", (0,), 1)], (0, 1), "a1 r1")
    step = step_of(chain, ())
    after = StepProfile("", "cpu", 0, step.programs, step.calls, (*step.moments, Moment(GAP, -1, 0, 0, 1.0)), FREE)
    assert simulate(after, [PLAIN]).moment_peaks[-1] == 7


def test_one_decision_for_each_call() -> None:
    with pytest.raises(ValueError, match="a plan for 1 region calls, but the step has 3: give one decision for each"):
        simulate(gpt_like_step(3), [PLAIN])


# Any step -------------------------------------------------------------------------------------------------------------


def slow_peaks(step: StepProfile, choices: list[Choice]) -> list[int]:
    """The highest of each moment, by sets: every live tape is a set of storages, the bytes are those of the union."""
    runs = [
        run_call(step.program_of(j), None if c.plain else c.keep, step.costs) for j, c in enumerate(choices)
    ]  # fmt: skip
    live: dict[int, tuple[int, int]] = {}  # call -> (values held from the forward on, all bytes)

    def tapes_bytes() -> int:
        storages: dict[object, int] = {}
        apart = 0
        for call, (held, nbytes) in live.items():
            values, ids = step.program_of(call).values, dict(step.calls[call].storages)
            for v in members(held):
                key = ids.get(v, (call, v))
                storages[key] = max(storages.get(key, 0), values[v].nbytes)
            apart += nbytes - sum(values[v].nbytes for v in members(held))  # what is cached or held by nodes
        return apart + sum(storages.values())

    peaks = []
    for moment in step.moments:
        base, call = step.resting_bytes + moment.level_bytes, moment.call
        if moment.kind == GAP:
            peaks.append(step.resting_bytes + moment.peak_bytes + tapes_bytes())
        elif moment.kind == FORWARD:
            peaks.append(base + tapes_bytes() + runs[call].forward_bytes)
            live[call] = (runs[call].held, runs[call].kept_bytes)
        else:
            peak = base + tapes_bytes()
            for event, passage in zip(step.program_of(call).events, runs[call].course, strict=True):
                swept = passage.highest_bytes - passage.before_bytes
                peak = max(peak, base + event.level_bytes + tapes_bytes() + swept)
                live[call] = (passage.held, passage.after_bytes)
                peak = max(peak, base + event.peak_bytes + tapes_bytes())
            if not runs[call].left_bytes:
                del live[call]
            peaks.append(peak)
    return peaks


def any_choices(rng: Random, step: StepProfile) -> list[Choice]:
    choices = []
    for j in range(len(step.calls)):
        n_values = len(step.program_of(j).values)
        keep = frozenset(v for v in range(n_values) if rng.random() < 0.4)
        choices.append(Choice(plain=rng.random() < 0.3, keep=keep))
    return choices


@settings(max_examples=100, deadline=None)
@given(steps(), st.randoms(use_true_random=False))
def test_any_step_is_what_a_slow_walk_finds(step: StepProfile, rng: Random) -> None:
    choices = any_choices(rng, step)
    found = simulate(step, choices)
    assert list(found.moment_peaks) == slow_peaks(step, choices)
    assert found.peak_bytes == max(found.moment_peaks) == max(p.nbytes for p in found.timeline)
    assert found.where == next(p.label for p in found.timeline if p.nbytes == found.peak_bytes)
    seconds = [p.seconds for p in found.timeline]
    assert seconds == sorted(seconds)
    assert seconds[-1] <= found.step_s + 1e-9
    quick = Simulator(step).run(choices, timeline=False)
    assert (quick.peak_bytes, quick.where, quick.step_s, quick.timeline) == (
        found.peak_bytes, found.where, found.step_s, (),
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_any_call_lets_go_of_all_that_is_released(program: ProgramProfile, rng: Random) -> None:
    keep = frozenset(v for v in range(len(program.values)) if rng.random() < 0.3)
    released = {e.slot for e in program.events if e.kind == RELEASE}
    all_released = released == set(range(len(program.slots)))
    for kept in (None, keep):
        run = run_call(program, kept, COSTS)
        assert (run.left_bytes == 0) or not all_released
        course = [p[:3] for p in run.course]
        assert all(before == after for (_, _, after), (before, _, _) in pairwise(course))
        assert all(highest >= before >= 0 <= after for before, highest, after in course)
        assert not course or course[0][0] == run.kept_bytes
        assert run.replayed == sum(len(p.sweep) for p in run.course)
