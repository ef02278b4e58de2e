"""From a watched step to a profile: what it predicts of other plans is what the meter finds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elbowroom
from elbowroom.core.checkpoint import wrapped_region
from elbowroom.core.region import Order, Region
from elbowroom.fitting.fit import profile
from elbowroom.planning.options import menus_of
from elbowroom.planning.profile import MADE, SOURCE, StepProfile
from elbowroom.planning.simulate import Choice, simulate
from tests.fitting.trainees import Net, batch

pytestmark = pytest.mark.usefixtures("few_objects")


class Rotating(nn.Module):
    """Blocks that all read one table, as rotary embeddings are read; nobody else holds it during backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turned() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        table = torch.outer(torch.arange(64.0), torch.arange(64.0)).cos()  # (T, D)
        for block in self.blocks:
            x = block(x, table)
        return x


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + self.out(F.gelu(self.linear(x))) * table


class Relus(nn.Module):
    """Each block's output is saved by its own relu, and by the next block's linear layer: one storage, two holders."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def attending() -> tuple[nn.Module, Tensor]:
    return Net(heads=4), batch()


def rotating() -> tuple[nn.Module, Tensor]:
    return Rotating(), torch.randn(8, 64, 64)


def relus() -> tuple[nn.Module, Tensor]:
    return Relus(), torch.randn(512, 64)


def take_step(model: nn.Module, inputs: Tensor) -> None:
    model.zero_grad()
    torch.manual_seed(1)
    model(inputs).square().mean().backward()


def profiled(model: nn.Module, inputs: Tensor) -> StepProfile:
    elbowroom.fit(model, "1TiB")
    take_step(model, inputs)
    found = profile(model)
    assert found is not None
    return found


class Orders:
    """Forces decisions, call by call."""

    def __init__(self, orders: list[Order]) -> None:
        self.orders = orders
        self.number = 0

    def order(self, region: Region) -> Order:
        self.number += 1
        return self.orders[(self.number - 1) % len(self.orders)]


def measured_bytes(model: nn.Module, inputs: Tensor, choices: list[Choice]) -> int:
    """The peak of a usual step (not one that proves) above its beginning, under forced decisions."""
    names = [name for name, module in model.named_modules() if wrapped_region(module) is not None]
    regions = [wrapped_region(model.get_submodule(name)) for name in names]
    orders = []
    for region, choice in zip(regions, choices, strict=True):
        assert region is not None
        assert region.last is not None
        orders.append(Order(plain=True) if choice.plain else Order(program=region.last.root.variant(choice.keep)))
    conductor = Orders(orders)
    fitting = elbowroom.core.checkpoint.around_of(model)
    elbowroom.core.checkpoint.bare(model)
    for region in regions:
        assert region is not None
        region.conductor = conductor
    for _ in range(4):
        take_step(model, inputs)
    model.zero_grad()
    with elbowroom.Meter() as meter:
        take_step(model, inputs)
    assert fitting is not None
    elbowroom.core.checkpoint.surround(model, fitting)
    return meter.peak_bytes


@pytest.mark.parametrize("make", [attending, relus, rotating])
@pytest.mark.parametrize("how", ["frugal", "plain", "half", "middle"])
def test_predicted_peaks_are_measured_peaks(make: Callable[[], tuple[nn.Module, Tensor]], how: str) -> None:
    model, inputs = make()
    prof = profiled(model, inputs)
    n = len(prof.calls)
    menus = menus_of(prof)
    recorded = [o for o in menus[prof.calls[-1].program] if not o.plain]
    middle = Choice(False, sorted(recorded, key=lambda o: o.kept_bytes)[len(recorded) // 2].keep)
    frugal, plain = Choice(False), Choice(True)
    choices = {
        "frugal": [frugal] * n,
        "plain": [plain] * n,
        "half": [frugal, plain] * (n // 2),
        "middle": [middle] * n,
    }[how]
    if how == "middle" and len(prof.programs) > 1:
        choices = [frugal] * n
    predicted_bytes = simulate(prof, choices).peak_bytes - prof.resting_bytes
    found_bytes = measured_bytes(model, inputs, choices)
    assert predicted_bytes >= found_bytes * 0.995, (predicted_bytes, found_bytes)
    assert predicted_bytes <= found_bytes * 1.06, (predicted_bytes, found_bytes)


def test_a_source_of_all_calls_is_one_storage() -> None:
    model, inputs = rotating()
    prof = profiled(model, inputs)
    ids = [dict(call.storages) for call in prof.calls]
    shared = set.intersection(*(set(of_call.values()) for of_call in ids))
    assert len(shared) == 1
    (number,) = shared
    for call, of_call in zip(prof.calls, ids, strict=True):
        (value,) = (v for v, storage in of_call.items() if storage == number)
        assert prof.programs[call.program].values[value].kind == SOURCE


def test_what_one_call_makes_and_the_next_one_saves_is_one_storage() -> None:
    model, inputs = relus()
    prof = profiled(model, inputs)
    for before, after in zip(prof.calls, prof.calls[1:], strict=False):
        common = {s for _, s in before.storages} & {s for _, s in after.storages}
        assert len(common) == 1
        (number,) = common
        made = next(v for v, s in before.storages if s == number and prof.program_of(0).values[v].kind == MADE)
        assert prof.programs[before.program].values[made].nbytes == 512 * 64 * 4


def test_inputs_that_the_caller_holds_cost_nothing() -> None:
    model, inputs = relus()
    prof = profiled(model, inputs)
    first = prof.program_of(0)
    assert [v.nbytes for v in first.values if v.kind == SOURCE] == [0]  # the batch: the caller has it
    later = prof.program_of(1)
    assert [v.nbytes for v in later.values if v.kind == SOURCE] == [512 * 64 * 4]


def test_equal_blocks_share_one_profile_and_it_is_json() -> None:
    prof = profiled(*attending())
    assert len(prof.programs) == 1
    assert len(prof.calls) == 4
    assert StepProfile.from_json(prof.to_json()) == prof
    assert all(op.seconds > 0 for op in prof.programs[0].operators)
    assert prof.plain_s > 0
