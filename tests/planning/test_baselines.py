"""Plans by rule of thumb: what each of them keeps."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from elbowroom.planning.baselines import baselines, every, greedy
from elbowroom.planning.profile import MADE, SOURCE, CallProfile, OperatorProfile, StepProfile, ValueProfile
from elbowroom.planning.simulate import Choice, simulate
from tests.planning.random_steps import gpt_like_step, steps


def plain(step: StepProfile, name: str) -> str:
    """One letter a call: plain or replayed."""
    return "".join("p" if c.plain else "r" for c in baselines(step)[name])


def test_rules_about_blocks() -> None:
    step = gpt_like_step(9)
    assert plain(step, "keep all") == "ppppppppp"
    assert plain(step, "replay all") == "rrrrrrrrr"
    assert plain(step, "replay every 2nd") == "prprprprp"
    assert plain(step, "replay every 3rd") == "pprpprppr"
    assert plain(step, "keep every 3rd") == "rrprrprrp"
    assert plain(step, "keep every 4th") == "rrrprrrpr"
    assert plain(step, "sqrt(n) blocks") == "rrprrprrp"
    assert all(not c.keep for c in baselines(step)["replay all"])
    assert set(baselines(gpt_like_step(1))) == {
        "keep all", "replay all", "sqrt(n) blocks", "sqrt(n) values", "greedy 25%", "greedy 50%", "greedy 75%",
    }  # fmt: skip


def test_one_in_k() -> None:
    a, b = Choice(plain=True), Choice(plain=False)
    assert every(2, 5, a, b) == (b, a, b, a, b)
    assert every(7, 3, a, b) == (b, b, b)


def small_step() -> StepProfile:
    """x -> a (10 bytes, 5 s) -> b (10 bytes, 1 s) -> c (40 bytes, 8 s) -> d (4 bytes, nobody saves it)."""
    values = (
        ValueProfile(SOURCE, -1, 8, "x"),
        *(ValueProfile(MADE, k, n) for k, n in enumerate((10, 10, 40, 4))),
    )
    operators = tuple(OperatorProfile(f"op{k}", (k,), (k + 1,), (), s) for k, s in enumerate((5.0, 1.0, 8.0, 9.0)))
    step = gpt_like_step(2)
    program = replace(step.programs[0], values=values, operators=operators, slots=(0, 1, 2, 3, 3), events=())
    return replace(step, programs=(program,), calls=(CallProfile("a", 0), CallProfile("b", 0)))


def test_greedy_keeps_what_is_dearest_to_make_again_for_its_bytes() -> None:
    step = small_step()  # seconds per byte: a 0.5, c 0.2, b 0.1; the two calls would hold 120 bytes of them
    keeps = {part: set(greedy(step, part)[0].keep) for part in (0.0, 0.1, 0.2, 0.4, 0.9, 1.0)}
    assert keeps == {0.0: set(), 0.1: set(), 0.2: {1}, 0.4: {1, 2}, 0.9: {1, 3}, 1.0: {1, 2, 3}}
    first, second = greedy(step, 0.9)
    assert first == second
    assert not first.plain


def test_one_value_in_the_root_of_all() -> None:
    assert [set(c.keep) for c in baselines(small_step())["sqrt(n) values"]] == [{2, 4}, {2, 4}]


@given(step=steps())
def test_every_rule_is_a_plan_of_any_step(step: StepProfile) -> None:
    plans = baselines(step)
    fastest_s = simulate(step, plans["keep all"]).step_s
    for choices in plans.values():
        assert len(choices) == len(step.calls)
        assert simulate(step, choices).step_s >= fastest_s - 1e-9
        for call, choice in zip(step.calls, choices, strict=True):
            values = step.programs[call.program].values
            assert all(values[v].kind == MADE for v in choice.keep)
