"""``fit`` itself: what it promises of bytes, bits and plans, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import io
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import elbowroom
from elbowroom.errors import InfeasibleBudgetError, PlanMismatchError, UsageError
from elbowroom.fitting import fit as fitting_module
from elbowroom.fitting.fit import Fitting, fitting_of
from elbowroom.planning.allocate import least_bytes as least
from elbowroom.planning.baselines import baselines
from elbowroom.planning.options import menus_of
from elbowroom.planning.plan import Plan
from elbowroom.planning.profile import StepProfile
from elbowroom.planning.simulate import simulate
from tests.fitting.trainees import Block, Net, batch, differences, state_of

pytestmark = pytest.mark.usefixtures("few_objects")

PLENTY = "1TiB"


def step(model: nn.Module, inputs: Tensor) -> None:
    torch.manual_seed(3)
    model(inputs).square().mean().backward()


def steps(model: nn.Module, n_steps: int, inputs: Tensor | None = None) -> None:
    inputs = batch() if inputs is None else inputs
    for _ in range(n_steps):
        model.zero_grad()
        step(model, inputs)


def profiled(model: nn.Module, inputs: Tensor) -> StepProfile:
    elbowroom.fit(model, PLENTY)
    steps(model, 1, inputs)
    found = fitting_module.profile(model)
    assert found is not None
    return found


def budget_between(prof: StepProfile, share: float) -> int:
    """0: the least that is feasible, 1: what the step takes without help."""
    least_bytes, _ = least(prof, menus_of(prof))
    plain_bytes = simulate(prof, baselines(prof)["keep all"]).peak_bytes
    return int(least_bytes + share * (plain_bytes - least_bytes))


# The budget ----------------------------------------------------------------------------------------------------------


def test_the_least_is_enough_and_anything_less_is_refused_before_the_forward_runs() -> None:
    model, inputs = Net(), batch()
    resting_bytes = profiled(model, inputs).resting_bytes
    elbowroom.fit(model, resting_bytes + 10_000)
    steps(model, 1, inputs)
    runs = []
    model.enter.register_forward_hook(lambda *_: runs.append(1))
    with pytest.raises(InfeasibleBudgetError, match="the least that this step can do with is") as told:
        steps(model, 1, inputs)
    assert runs == []
    least_bytes = told.value.least_bytes
    assert told.value.budget_bytes == resting_bytes + 10_000
    assert "blocks." in told.value.where

    elbowroom.fit(model, least_bytes - 4096)
    steps(model, 1, inputs)
    with pytest.raises(InfeasibleBudgetError):
        steps(model, 1, inputs)

    elbowroom.fit(model, least_bytes)
    steps(model, 3, inputs)
    report = elbowroom.report(model)
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= least_bytes


def test_less_than_what_rests_is_refused_in_the_first_forward() -> None:
    model = Net()
    elbowroom.fit(model, 4096)
    with pytest.raises(InfeasibleBudgetError, match="before the step begins"):
        steps(model, 1)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_steps_that_prove_again_keep_the_budget_too(share: float) -> None:
    """A step proves at the regions' calls 2, 4 and 8; here blocks dominate, and each of these steps is metered."""
    model, inputs = Net(n_blocks=6, dim=64), batch(dim=64)
    prof = profiled(model, inputs)
    budget_bytes = budget_between(prof, share)
    elbowroom.fit(model, budget_bytes)
    peaks = []
    for _ in range(8):
        model.zero_grad()
        with elbowroom.Meter() as meter:
            step(model, inputs)
        peaks.append(meter.start_bytes + meter.peak_bytes)
    assert max(peaks[1:]) <= budget_bytes
    plan = elbowroom.plan(model)
    assert plan is not None
    assert max(peaks[2:]) == pytest.approx(plan.predicted.peak_bytes, rel=0.01)


@pytest.mark.parametrize("budget", ["12 parsecs", "0", 0, "-1GiB", "120%", None])
def test_nonsense_is_refused(budget: object) -> None:
    with pytest.raises(UsageError):
        elbowroom.fit(Net(), budget)  # type: ignore[arg-type]


def test_words_for_budgets() -> None:
    for budget in ("max", "85%", "3GiB", 3 * 2**30):
        model = elbowroom.fit(Net(), budget)
        steps(model, 2)
        plan = elbowroom.plan(model)
        assert plan is not None
        assert all(d.plain for d in plan.decisions)  # plenty


def test_a_misprediction_tightens_the_plan_and_is_said_once() -> None:
    """From step 4 on somebody's hook takes memory in backward that the profile knows nothing of."""
    model, inputs = Net(n_blocks=6, dim=64), batch(dim=64)
    prof = profiled(model, inputs)
    budget_bytes = budget_between(prof, 0.7)
    elbowroom.fit(model, budget_bytes)
    steps(model, 3, inputs)
    before = elbowroom.plan(model)
    extra_bytes = 2**18
    taken: list[Tensor] = []

    def takes_memory(grad: Tensor) -> None:
        taken.append(torch.zeros(extra_bytes, dtype=torch.uint8))

    def troubled_steps(n_steps: int) -> None:
        for _ in range(n_steps):
            model.zero_grad()
            out = model(inputs)
            out.register_hook(takes_memory)
            out.square().mean().backward()
            taken.clear()

    with pytest.warns(RuntimeWarning, match="above the budget") as warned:
        troubled_steps(13)
    after = elbowroom.plan(model)
    assert len(warned) == 1
    assert before is not None
    assert after is not None
    assert after.predicted.peak_bytes <= budget_bytes - extra_bytes * 9 // 10
    assert after.predicted.peak_bytes < before.predicted.peak_bytes


def test_what_rests_is_known_under_a_meter_that_began_before_the_step() -> None:
    model, inputs = elbowroom.fit(Net(), PLENTY), batch()
    with elbowroom.Meter() as meter:
        ballast = torch.zeros(2**18)
        steps(model, 1, inputs)
    prof = fitting_module.profile(model)
    assert prof is not None
    assert prof.resting_bytes == pytest.approx(meter.start_bytes + ballast.nbytes, abs=4096)


# Plans ---------------------------------------------------------------------------------------------------------------


def a_plan(model: nn.Module, inputs: Tensor) -> Plan:
    prof = profiled(model, inputs)
    elbowroom.fit(model, budget_between(prof, 0.5))
    steps(model, 2, inputs)
    plan = elbowroom.plan(model)
    assert plan is not None
    return plan


def test_the_last_blocks_run_plainly_by_themselves() -> None:
    """Their backward comes first, before anything is freed: keeping them costs least."""
    model, inputs = Net(n_blocks=6, dim=64), batch(dim=64)
    prof = profiled(model, inputs)
    elbowroom.fit(model, budget_between(prof, 0.85))
    steps(model, 2, inputs)
    plan = elbowroom.plan(model)
    assert plan is not None
    kept = [d.kept_bytes for d in plan.decisions]
    assert plan.decisions[-1].plain
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]


def test_a_plan_from_a_file_decides_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = Net(), batch()
    plan = a_plan(model, inputs)
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["budget_bytes"] == plan.budget_bytes
    (tmp_path / "plan.json").write_text(plan.to_json())

    del model
    again = Net()
    elbowroom.fit(again, plan=tmp_path / "plan.json")
    steps(again, 3, inputs)
    assert elbowroom.plan(again) == plan


def test_a_given_plan_stays_when_more_rests_than_it_knew() -> None:
    plan, inputs = a_plan(Net(), batch()), batch()
    ballast = torch.zeros(2**22)
    model = elbowroom.fit(Net(), plan=plan)
    with pytest.warns(RuntimeWarning, match="the plan was given, and stays"):
        steps(model, 4, inputs)
    assert elbowroom.plan(model) == plan
    del ballast


def test_a_plan_is_refused_with_both_fingerprints() -> None:
    plan = a_plan(Net(), batch())
    for model, inputs, what in [(Net(n_blocks=5), batch(), "model"), (Net(), batch(4), "shape")]:
        elbowroom.fit(model, plan=plan)
        with pytest.raises(PlanMismatchError, match=what) as told:
            step(model, inputs)
        assert told.value.planned == plan.fingerprint
        assert told.value.found != plan.fingerprint
        assert plan.fingerprint in str(told.value)
        assert told.value.found in str(told.value)


def test_a_plan_is_refused_for_other_code_of_the_same_shape() -> None:
    plan = a_plan(Net(), batch())
    model = Net()
    for block in model.blocks:
        block.drop = nn.Identity()
    elbowroom.fit(model, plan=plan)
    steps(model, 1)
    with pytest.raises(PlanMismatchError, match="run other operators"):
        steps(model, 1)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 99}', '{"format": 1, "decisions": 3}'])
def test_a_file_that_is_no_plan(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(UsageError, match=r"plan\.json: cannot be read as a plan"):
        elbowroom.fit(Net(), plan=tmp_path / "plan.json")


def test_budget_and_plan_are_one_or_the_other() -> None:
    with pytest.raises(UsageError, match="and not both"):
        elbowroom.fit(Net(), "1GiB", plan="plan.json")
    with pytest.raises(UsageError, match="not fitted"):
        elbowroom.report(Net())
    with pytest.raises(TypeError, match=r"needs an nn\.Module"):
        elbowroom.fit(lambda x: x, "1GiB")  # type: ignore[type-var]


# Nothing is left behind ----------------------------------------------------------------------------------------------


def test_names_state_and_classes_are_as_before_and_unfit_undoes_it() -> None:
    model = Net()
    names = [name for name, _ in model.named_modules()]
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    contents = [set(vars(m)) for m in model.modules()]
    assert elbowroom.fit(model, PLENTY) is model
    steps(model, 3)
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.state_dict()) == keys
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"
    assert elbowroom.unfit(model) is model
    assert [type(m) for m in model.modules()] == classes
    assert [set(vars(m)) for m in model.modules()] == contents
    assert elbowroom.unfit(model) is model


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_fitted_on_their_own(way: str) -> None:
    model, inputs = elbowroom.fit(Net(), PLENTY), batch()
    steps(model, 2, inputs)
    if way == "deepcopy":
        copied = copy.deepcopy(model)
    elif way == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert fitting_of(copied) is not fitting_of(model)
    assert elbowroom.plan(copied) is None
    steps(copied, 2, inputs)
    assert elbowroom.plan(copied) is not None
    steps(model, 1, inputs)
    assert differences(state_of(model), state_of(copied)) == []


def test_a_shallow_copy_trains_with_the_same_bits_within_the_budget() -> None:
    model, inputs = Net(), batch()
    budget_bytes = budget_between(profiled(model, inputs), 0.5)
    plain = elbowroom.unfit(copy.deepcopy(model))
    steps(plain, 1, inputs)
    expected = state_of(plain)
    del plain
    elbowroom.fit(model, budget_bytes + sum(t.nbytes for t in expected if t is not None))
    steps(model, 2, inputs)
    shallow = copy.copy(model)
    assert list(shallow.state_dict()) == list(model.state_dict())
    for trained in (shallow, shallow, model, shallow, model):
        trained.zero_grad()
        with elbowroom.Meter() as meter:
            step(trained, inputs)
        assert differences(expected, state_of(trained)) == []
        fitting = fitting_of(trained)
        assert fitting is not None
        assert meter.start_bytes + meter.peak_bytes <= fitting.budget_bytes


def test_what_is_done_to_a_shallow_copy_is_not_done_to_the_model() -> None:
    """Its blocks are the model's own; what ``fit`` knows is not."""
    model, inputs = elbowroom.fit(Net(), PLENTY), batch()
    steps(model, 2, inputs)
    shallow = copy.copy(model)
    assert fitting_of(shallow) is not fitting_of(model)
    steps(shallow, 2, inputs)
    assert fitting_of(shallow) is not fitting_of(model)
    elbowroom.unfit(shallow)
    assert fitting_of(shallow) is None
    assert fitting_of(model) is not None


def test_hooks_of_optimizers_are_gone_after_the_step() -> None:
    from torch.optim import optimizer as registry

    before = len(registry._global_optimizer_pre_hooks), len(registry._global_optimizer_post_hooks)
    model = elbowroom.fit(Net(), PLENTY)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        steps(model, 1)
        optimizer.step()
    elbowroom.unfit(model)
    assert (len(registry._global_optimizer_pre_hooks), len(registry._global_optimizer_post_hooks)) == before


def test_regions_by_type_name_and_glob() -> None:
    for regions in (Block, "blocks.*", ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]):
        model = elbowroom.fit(Net(), PLENTY, regions=regions)
        steps(model, 2)
        plan = elbowroom.plan(model)
        assert plan is not None
        assert [d.region for d in plan.decisions] == [f"blocks.{i}" for i in range(4)]
        assert "4 regions" in str(elbowroom.report(model))


def test_a_leaf_is_a_region_of_its_own() -> None:
    model = elbowroom.fit(nn.Linear(8, 8), PLENTY)
    steps(model, 3, torch.randn(4, 8))
    plan = elbowroom.plan(model)
    assert plan is not None
    assert [d.region for d in plan.decisions] == ["Linear"]
    assert type(elbowroom.unfit(model)) is nn.Linear


def test_a_profile_that_fails_is_told_once_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("a bug of ours")

    monkeypatch.setattr(fitting_module, "step_profile", fails)
    watched = []
    started = fitting_module.StepWatch.started
    monkeypatch.setattr(fitting_module.StepWatch, "started", lambda device: watched.append(1) or started(device))
    model, plain, inputs = Net(), Net(), batch()
    plain.load_state_dict(model.state_dict())
    elbowroom.fit(model, PLENTY)
    with pytest.warns(RuntimeWarning, match="a bug of ours") as warned:
        steps(model, 8, inputs)
    steps(plain, 1, inputs)
    assert len(warned) == 1
    assert len(watched) == fitting_module.MAX_ATTEMPTS
    assert differences(state_of(plain), state_of(model)) == []


def test_report_has_what_was_predicted_and_measured() -> None:
    model, inputs = Net(), batch()
    elbowroom.fit(model, PLENTY)
    assert "no plan yet" in str(elbowroom.report(model))
    steps(model, 6, inputs)
    report = elbowroom.report(model)
    assert report.measured_peak_bytes == pytest.approx(report.predicted_peak_bytes, rel=0.03)
    assert report.measured_step_s is not None
    assert report.resident_bytes > report.predicted_peak_bytes  # type: ignore[operator]
    text = str(report)
    assert "trainees.py" in text
    assert "blocks.0 ... blocks.3" in text
    assert isinstance(fitting_of(model), Fitting)
