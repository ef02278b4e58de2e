"""What people do in their training loops, under ``fit``: the bits of plain training, and a peak within the budget."""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom
from elbowroom.fitting.fit import MAX_KINDS, fitting_of
from elbowroom.fitting.memory import resting_bytes
from tests.fitting.trainees import (
    DIM,
    Block,
    Net,
    Trial,
    adamw,
    batch,
    differences,
    plain_step,
    sgd,
    state_of,
    train_plainly,
    trial,
)

pytestmark = pytest.mark.usefixtures("few_objects")


def assert_planned(found: Trial) -> None:
    assert elbowroom.plan(found.model) is not None, "no plan came into force"
    report = elbowroom.report(found.model)
    assert report.measured_peak_bytes is None or report.measured_peak_bytes <= found.budget_bytes


# The usual loop, and its variants ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.45, 0.7, 0.9, 1.3])
def test_plain_loop(fraction: float) -> None:
    found = trial(Net(heads=2), plain_step, fraction=fraction)
    assert_planned(found)
    assert len(found.fitting.kinds) == 1
    measured, predicted = elbowroom.report(found.model).measured_peak_bytes, elbowroom.plan(found.model)
    assert measured is not None
    assert predicted is not None
    assert abs(measured - predicted.predicted.peak_bytes) <= 0.03 * measured


def test_gradient_accumulation() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        for _ in range(3):
            (model(batch(4)).square().mean() / 3).backward()
        optimizer.step()

    found = trial(Net(), step)
    assert_planned(found)
    assert {kind.gradients for kind in found.fitting.kinds} == {False, True}
    assert len(found.fitting.kinds) == 2


def test_zero_grad_that_keeps_the_gradients() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        model(batch()).square().mean().backward()
        optimizer.step()

    assert_planned(trial(Net(), step))


def test_zero_grad_after_the_step() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert_planned(trial(Net(), step))


def test_optimizer_state_that_is_born_at_the_first_step() -> None:
    found = trial(Net(), plain_step, optimizer_of=adamw, fraction=0.6, metered=(2, -1))
    assert_planned(found)
    plan = elbowroom.plan(found.model)
    assert plan is not None
    parameters_bytes = sum(p.nbytes for p in found.model.parameters())
    assert plan.resting_bytes >= 3 * parameters_bytes


def test_clipping_and_a_schedule() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        optimizer.step()

    assert_planned(trial(Net(), step))


def test_autocast() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch()).float().square().mean()
        loss.backward()
        optimizer.step()

    assert_planned(trial(Net(heads=2), step))


# Several forwards before one backward --------------------------------------------------------------------------------


def test_two_forwards_before_one_backward() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        (model(batch()) * model(batch())).mean().backward()
        optimizer.step()

    found = trial(Net(), step)
    assert_planned(found)
    assert [len(kind.calls) for kind in found.fitting.kinds] == [2]
    plan = elbowroom.plan(found.model)
    assert plan is not None
    assert len(plan.decisions) == 8


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Net(2), Net(3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.left(x) * self.right(y)).sum(-1)


def test_two_towers_in_one_model() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        model(batch(), batch()).square().mean().backward()
        optimizer.step()

    found = trial(Towers(), step)
    assert_planned(found)
    assert len(found.fitting.names) == 5


def critic_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    real, fake = model(batch()).mean(), model(batch()).mean()
    (fake - real).backward()
    optimizer.step()


def generator_like_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    z = batch().requires_grad_()
    (-model(z).mean()).backward()
    assert z.grad is not None
    optimizer.zero_grad()


def test_two_losses_of_a_gan_in_turn() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        critic_step(model, optimizer, number)
        generator_like_step(model, optimizer, number)

    found = trial(Net(), step, 8)
    assert sorted(len(kind.calls) for kind in found.fitting.kinds) == [1, 2]


def test_patterns_that_begin_alike_in_changing_order() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        n_forwards = 1 + random.Random(number).randrange(3)
        sum(model(batch(4)).square().mean() for _ in range(n_forwards)).backward()  # type: ignore[union-attr]
        optimizer.step()

    # Nobody can know how many forwards will follow: the plan is that of the heaviest, or of what followed last time.
    found = trial(Net(), step, 12, metered=())
    assert {len(kind.calls) for kind in found.fitting.kinds} == {1, 2, 3}


# What one of them keeps under its new plan is there while the other one runs, whose profile did not know of it.
@pytest.mark.filterwarnings("ignore:elbowroom. a step took")
def test_two_fitted_models_in_one_process() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = Net(3), Net(2)

    def step(pair: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        fake = pair.generator(batch())
        (pair.critic(fake.detach()).mean() - pair.critic(batch()).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        (-pair.critic(fake).mean()).backward()
        optimizer.step()

    pair = Pair()
    n_steps = 8
    expected = train_plainly(pair, step, n_steps)
    budget_bytes = resting_bytes() + expected.start_bytes + int(0.7 * expected.peak_bytes)
    elbowroom.fit(pair.generator, budget=budget_bytes)
    elbowroom.fit(pair.critic, budget=budget_bytes)
    optimizer = sgd(pair)
    for number in range(n_steps):
        torch.manual_seed(number)
        step(pair, optimizer, number)
        assert not differences(expected.states[number], state_of(pair)), f"step {number}"
    assert elbowroom.plan(pair.critic) is not None


def test_two_fitted_models_under_one_optimizer() -> None:
    first, second = Net(1), Net(1)
    elbowroom.fit(first, budget="1GiB")
    elbowroom.fit(second, budget="1GiB")
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for _ in range(3):
        (first(batch()) * second(batch())).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert elbowroom.plan(first) is not None


# Calls that are no training ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(mode: Any) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        plain_step(model, optimizer, number)
        model.eval()
        with mode():
            model(batch(3))
        model.train()

    found = trial(Net(), step)
    assert_planned(found)
    assert len(found.fitting.kinds) == 1


def test_evaluation_between_forward_and_backward() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        with torch.no_grad():
            model(batch(3))
        loss.backward()
        optimizer.step()

    found = trial(Net(), step)
    assert_planned(found)
    assert len(found.fitting.kinds) == 1


def test_a_forward_that_nobody_backs() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        float(model(batch(2)).detach().mean())  # with gradients enabled, by oversight
        plain_step(model, optimizer, number)

    found = trial(Net(), step)
    assert_planned(found)
    assert [len(kind.calls) for kind in found.fitting.kinds] == [1]


def test_a_loss_kept_for_the_log_with_its_graph() -> None:
    log: list[Tensor] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        log.append(loss)

    found = trial(Net(), step)
    assert_planned(found)
    assert len(found.fitting.kinds) == 1


def test_eval_mode_with_gradients() -> None:
    model = Net().eval()
    found = trial(model, plain_step)
    assert_planned(found)


def test_modes_are_kinds_of_their_own() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        model.train(number % 2 == 0)
        plain_step(model, optimizer, number)

    found = trial(Net(), step, 8)
    assert_planned(found)
    assert len(found.fitting.kinds) == 2


# Shapes --------------------------------------------------------------------------------------------------------------


def test_last_smaller_batch() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        model(batch(3 if number % 4 == 3 else 8)).square().mean().backward()
        optimizer.step()

    found = trial(Net(), step, 13, metered=(5, 9, -1))
    assert len(found.fitting.kinds) == 2


def test_known_lengths_are_not_profiled_again() -> None:
    lengths = (16, 32, 24)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        model(batch(8, lengths[number % 3])).square().mean().backward()
        optimizer.step()

    model = Net()
    elbowroom.fit(model, budget="1GiB")
    fitting = fitting_of(model)
    assert fitting is not None
    optimizer = sgd(model)
    for number in range(3):
        step(model, optimizer, number)
    profiles: list[Any] = []
    for number in range(3, 9):
        step(model, optimizer, number)
        fitting.catch_up()
        profiles.append([p.profile.fingerprint for p in fitting.kinds.values()])
    assert all(sorted(p) == sorted(profiles[0]) for p in profiles)
    assert len(profiles[0]) == 3
    assert all(p.n_steps == 2 for p in fitting.kinds.values())


def test_changing_lengths_have_the_same_bits() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        model(batch(8, (16, 32, 24)[number % 3])).square().mean().backward()
        optimizer.step()

    assert_planned(trial(Net(heads=2), step, 9))


def test_kinds_are_bounded_in_number() -> None:
    model = Net(1, 8)
    elbowroom.fit(model, budget="1GiB")
    for n_tokens in range(1, MAX_KINDS + 4):
        model(batch(1, n_tokens, 8)).sum().backward()
        model.zero_grad()
    fitting = fitting_of(model)
    assert fitting is not None
    fitting.catch_up()
    assert len(fitting.kinds) == MAX_KINDS
    last = {p.profile.fingerprint for p in fitting.kinds.values()}
    model(batch(1, MAX_KINDS + 3, 8)).sum().backward()
    fitting.catch_up()
    assert {p.profile.fingerprint for p in fitting.kinds.values()} == last


# Parameters ----------------------------------------------------------------------------------------------------------


def test_frozen_layers() -> None:
    model = Net()
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    model.enter.requires_grad_(False)
    assert_planned(trial(model, plain_step, fraction=0.75))


def test_layers_unfrozen_on_the_way() -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        model.blocks[0].requires_grad_(number >= 3)
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()

    found = trial(Net(), step, 8, optimizer_of=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    assert_planned(found)


class LoRA(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, inner.in_features) / 8)
        self.b = nn.Parameter(torch.zeros(inner.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.a.T @ self.b.T


def test_lora_adapters() -> None:
    model = Net().requires_grad_(False)
    for block in model.blocks:
        block.up = LoRA(block.up)
    assert_planned(trial(model, plain_step, fraction=0.75))


def test_shared_blocks() -> None:
    model = Net(2)
    model.blocks = nn.ModuleList([model.blocks[0], model.blocks[1], model.blocks[0], model.blocks[1]])
    found = trial(model, plain_step)
    assert_planned(found)
    plan = elbowroom.plan(model)
    assert plan is not None
    assert len(plan.decisions) == 4


def test_batch_norm_statistics() -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(DIM, DIM, 3, padding=1), nn.BatchNorm1d(DIM)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + self.norm(self.conv(x)))

    assert_planned(trial(nn.Sequential(Conv(), Conv(), Conv()), plain_step, fraction=0.9))


# What a model does and gives -----------------------------------------------------------------------------------------


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Answering(Net):
    """Answers in different forms; the loss is made inside."""

    def __init__(self, form: str) -> None:
        super().__init__(3)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        loss = logits.square().mean()
        if self.form == "model output":
            from transformers.modeling_outputs import CausalLMOutput

            return CausalLMOutput(loss=loss, logits=logits)
        if self.form == "nested":
            return {"losses": [(loss, None)], "more": OrderedDict(logits=logits)}
        return {
            "tensor": loss, "dict": {"loss": loss, "logits": logits}, "tuple": (loss, logits, None, 3),
            "dataclass": Output(loss, logits),
        }[self.form]  # fmt: skip


def loss_in(out: Any) -> Tensor:
    if isinstance(out, Tensor):
        return out
    if isinstance(out, tuple):
        return out[0]
    if isinstance(out, dict) and "losses" in out:
        return out["losses"][0][0]
    return out["loss"] if isinstance(out, dict) else out.loss


@pytest.mark.parametrize("form", ["tensor", "dict", "tuple", "dataclass", "model output", "nested"])
def test_forms_of_output(form: str) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        loss_in(model(batch())).backward()
        optimizer.step()

    assert_planned(trial(Answering(form), step))


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = Net(2), Net(3)

    def forward(self, x: Tensor, way: str) -> Tensor:
        return self.images(x) if way == "images" else self.texts(x)


def test_called_twice_with_different_regions() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        (model(batch(), "images") * model(batch(), "texts")).mean().backward()
        optimizer.step()

    found = trial(TwoWays(), step)
    assert_planned(found)
    plan = elbowroom.plan(found.model)
    assert plan is not None
    assert [d.region.split(".")[0] for d in plan.decisions] == ["images"] * 2 + ["texts"] * 3


def test_other_regions_in_every_step() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        model(batch(), "texts" if number % 2 else "images").square().mean().backward()
        optimizer.step()

    found = trial(TwoWays(), step, 8)
    assert len(found.fitting.kinds) == 2


class LayerDrop(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            if float(torch.rand(())) < 0.7:
                x = block(x)
        return self.leave(x)


def test_regions_skipped_at_random() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="elbowroom: a step took", category=RuntimeWarning)
        trial(LayerDrop(), plain_step, 12, metered=())


def test_regions_that_need_no_gradients() -> None:
    model = Net()
    model.enter.requires_grad_(False)
    model.blocks.requires_grad_(False)
    trial(model, plain_step, fraction=1.1)


def test_a_region_that_nothing_needs() -> None:
    class Detached(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for i, block in enumerate(self.blocks):
                x = x + block(x).detach() if i == 1 else block(x)
            return self.leave(x)

    assert_planned(trial(Detached(), plain_step))


# In these two the profile does not see all of a step's bytes: the watch ends with the first backward (docs/planner.md).
# The bits are what counts here.
@pytest.mark.filterwarnings("ignore:elbowroom. a step took")
def test_retained_graph_and_two_backwards() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        out = model(batch())
        out.square().mean().backward(retain_graph=True)
        out.abs().mean().backward()
        optimizer.step()

    trial(Net(), step, metered=())


def test_gradients_asked_for_by_autograd_grad() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        loss = model(batch()).square().mean()
        parameters = list(model.parameters())
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g
        optimizer.step()

    assert_planned(trial(Net(), step))


@pytest.mark.filterwarnings("ignore:elbowroom. a step took")
def test_gradient_penalty() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        x = batch(4).requires_grad_()
        out = model(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.square().sum()).backward()
        optimizer.step()

    trial(Net(2), step, metered=())


def test_head_called_outside_the_model() -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        out = model(batch())
        model.leave(out).square().mean().backward()
        optimizer.step()

    assert_planned(trial(Net(), step))


def test_block_called_outside_the_model() -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        model.blocks[0](model(batch())).square().mean().backward()
        optimizer.step()

    assert_planned(trial(Net(), step))


def test_a_model_inside_a_fitted_one_is_called_again() -> None:
    class Recursive(Net):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            x = super().forward(x)
            return self(x, again=False) if again else x

    assert_planned(trial(Recursive(2), plain_step))


# Errors --------------------------------------------------------------------------------------------------------------


class Failing(Net):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.fails and i == 2:
                raise KeyError("in the middle of forward")
        return self.leave(x)


@pytest.mark.parametrize("when", [0, 1, 2])
def test_exception_in_forward(when: int) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        model.fails = number == when
        try:
            plain_step(model, optimizer, number)
        except KeyError:
            assert model.fails
        model.fails = False

    assert_planned(trial(Failing(), step, 7))


@pytest.mark.parametrize("when", [0, 1, 2])
def test_exception_in_backward(when: int) -> None:
    def refuse(grad: Tensor) -> Tensor:
        raise KeyError("in the middle of backward")

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        handle = model.blocks[1].up.bias.register_hook(refuse) if number == when else None
        try:
            plain_step(model, optimizer, number)
        except KeyError:
            assert handle is not None
            handle.remove()

    assert_planned(trial(Net(), step, 7))


@pytest.mark.parametrize("when", [0, 1, 2])
def test_exception_between_forward_and_backward(when: int) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        if number == when:
            return
        loss.backward()
        optimizer.step()

    found = trial(Net(), step, 7)
    assert_planned(found)
    assert len(found.fitting.kinds) == 1


def test_a_failed_step_leaves_the_profiler_free() -> None:
    model = Failing()
    elbowroom.fit(model, budget="1GiB")
    model.fails = True
    with pytest.raises(KeyError):
        model(batch())
    assert not elbowroom.Meter.busy()
    model.fails = False
    model.blocks[1].up.bias.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch()).sum().backward()
    assert not elbowroom.Meter.busy()


# Others who measure --------------------------------------------------------------------------------------------------


def test_a_profiler_is_free_between_steps() -> None:
    model = Net()
    elbowroom.fit(model, budget="1GiB")
    optimizer = sgd(model)
    for number in range(3):
        plain_step(model, optimizer, number)
        assert not elbowroom.Meter.busy()
        with torch.profiler.profile() as profile:
            torch.ones(3) + 1
        assert any(e.key == "aten::add" for e in profile.key_averages())


def test_a_meter_around_some_steps() -> None:
    found = trial(Net(), plain_step, 8, metered=(0, 3, 4, -1))
    assert_planned(found)


def test_a_meter_around_every_step() -> None:
    assert_planned(trial(Net(), plain_step, 6, metered=(0, 1, 2, 3, 4, 5)))


@pytest.mark.parametrize("profiled", [range(7), (1, 2, 5), (0,)])
def test_torch_profiler_around_steps(profiled: Sequence[int]) -> None:
    model, n_steps = Net(), 7
    expected = train_plainly(model, plain_step, n_steps)
    elbowroom.fit(model, budget="1GiB")
    optimizer = sgd(model)
    for number in range(n_steps):
        torch.manual_seed(number)
        if number in profiled:
            with torch.profiler.profile() as profile:
                plain_step(model, optimizer, number)
            assert sum(e.count for e in profile.key_averages() if e.key == "aten::addmm") >= 10
        else:
            plain_step(model, optimizer, number)
        assert not differences(expected.states[number], state_of(model)), f"step {number}"
    assert (elbowroom.plan(model) is not None) == (len(profiled) < n_steps)


def test_torch_profiler_around_the_whole_run() -> None:
    with torch.profiler.profile() as profile:
        model = Net()
        elbowroom.fit(model, budget="1GiB")
        optimizer = sgd(model)
        for number in range(3):
            plain_step(model, optimizer, number)
    assert sum(e.count for e in profile.key_averages() if e.key == "aten::addmm") >= 30
    for number in range(2):
        plain_step(model, optimizer, number)
    assert elbowroom.plan(model) is not None


def test_torch_profiler_with_a_schedule() -> None:
    model = Net()
    elbowroom.fit(model, budget="1GiB")
    optimizer = sgd(model)
    traces: list[int] = []
    schedule = torch.profiler.schedule(wait=2, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(
        schedule=schedule,
        on_trace_ready=lambda p: traces.append(sum(e.count for e in p.key_averages() if e.key == "aten::addmm")),
    ) as profile:
        for number in range(8):
            plain_step(model, optimizer, number)
            profile.step()
    assert len(traces) == 1
    assert traces[0] >= 20
    assert elbowroom.plan(model) is not None


def test_a_profiler_begun_inside_a_step() -> None:
    """Between the forward and the backward of a step that is being watched."""
    model = Net()
    elbowroom.fit(model, budget="1GiB")
    optimizer = sgd(model)
    for number in range(5):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        if number in (0, 2):
            with torch.profiler.profile() as profile:
                loss.backward()
            assert any(e.key == "aten::mm" for e in profile.key_averages())
        else:
            loss.backward()
        optimizer.step()
    assert elbowroom.plan(model) is not None


def test_blocks_of_different_kinds_of_work() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList(Block(heads=2) for _ in range(2))
            self.decoder = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in (*self.encoder, *self.decoder):
                x = block(x)
            return x

    assert_planned(trial(Mixed(), plain_step))
