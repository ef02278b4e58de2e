"""The tape in numbers against the tape itself: same values held and cached, same bytes, event by event."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elbowroom.core.checkpoint import region_of
from elbowroom.core.program import Program
from elbowroom.core.region import Order, Region
from elbowroom.core.replayer import Tape
from elbowroom.planning.profile import PARAMETER, OperatorProfile, ProgramProfile, ValueProfile
from elbowroom.planning.tapes import Interpreter, _Tape, members
from tests.planning.random_steps import FREE

Watched = list[tuple[str, int, set[int], set[int]]]


def profile_of(program: Program) -> ProgramProfile:
    """Operators, values and slots of a recorded program; no events: the tests bring their own."""
    operators = tuple(
        OperatorProfile(str(op.func), op.reads, tuple(v for v in op.outputs if v >= 0), op.writes, 1.0)
        for op in program.ops
    )
    values = tuple(
        ValueProfile(v.kind, v.maker, 0 if v.kind == PARAMETER else v.nbytes, v.name or "") for v in program.values
    )
    slots = tuple(-1 if s.dead else s.bound for s in program.slots)
    return ProgramProfile("", "f", operators, values, slots, (), 1.0)


class Spectator:
    """Has one region run along a program, and writes down what its tape holds at every event of the backward."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.tape: Tape | None = None
        self.early: list[int] = []  # slots let go of before the forward ended
        self.events: Watched = []
        self.sweeps: list[list[tuple[int, int]]] = []  # per sweep: (operator, bytes after it ran, before any is freed)
        self.asked: dict[int, Any] = {}  # slot -> the storage that its node holds

    def order(self, region: Region) -> Order:
        return Order(program=self.program, watch=self)

    def operator_begins(self) -> None: ...

    def operator_ended(self, k: int) -> None: ...

    def returned(self) -> None: ...

    def forward_ended(self, program: Program, tape: Tape, storages: list[int]) -> None:
        self.program, self.tape = program, tape

    def asks(self, slot: int) -> None:
        self.sweeps.append([])

    def got(self, slot: int) -> None:
        self._write_down("ask", slot)

    def released(self, slot: int) -> None:
        self.asked.pop(slot, None)
        if self.tape is None:
            self.early.append(slot)
        else:
            self._write_down("release", slot)

    def _write_down(self, kind: str, slot: int) -> None:
        assert self.tape is not None
        held = {v for v, tensor in enumerate(self.tape.held) if tensor is not None}
        self.events.append((kind, slot, held, set(self.tape._cache)))

    def bytes_with(self, env: dict[int, Tensor]) -> int:
        """What the tape, running nodes and a sweep hold, in distinct storages; parameters are there anyway."""
        assert self.tape is not None
        values = self.program.values
        mine = [t for v, t in enumerate(self.tape.held) if isinstance(t, Tensor) and values[v].kind != PARAMETER]
        mine += [*self.tape._cache.values(), *(t for v, t in env.items() if values[v].kind != PARAMETER)]
        storages = [t.untyped_storage() for t in mine] + list(self.asked.values())
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@pytest.fixture
def spectate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Spectator]:
    """``spectate(f, inputs, keep)``: a backward through ``f`` with those values kept, seen by a spectator."""
    spectators: list[Spectator] = []
    run, asked = Tape._run, Tape._asked

    def spied_run(tape: Tape, k: int, env: dict[int, Tensor], ours: frozenset[int]) -> None:
        run(tape, k, env, ours)
        if spectators:
            at_hand = [v for v in tape.program.ops[k].made if tape._hand[v]]
            again = sum(tape.program.values[v].nbytes for v in at_hand if v in tape.program.ops[k].outputs)
            spectators[-1].sweeps[-1].append((k, spectators[-1].bytes_with(env) + again))

    def spied_asked(tape: Tape, slot: int) -> None:
        value = tape.program.slots[slot].bound
        if spectators and tape._hand[value] == 2:  # about to leave the cache, perhaps; the node holds it
            spectators[-1].asked[slot] = tape._cache[value].untyped_storage()
        asked(tape, slot)

    monkeypatch.setattr(Tape, "_run", spied_run)
    monkeypatch.setattr(Tape, "_asked", spied_asked)

    def spectate(f: Callable[..., Tensor], inputs: list[Tensor], keep: frozenset[int]) -> Spectator:
        region = region_of(f, None, "never")
        region.run(f, tuple(inputs), {})
        assert region.last is not None
        keepable = frozenset(members(Interpreter(profile_of(region.last), FREE).keepable))
        spectator = Spectator(region.last.variant(keep & keepable))
        region.conductor = spectator
        out = region.run(f, tuple(inputs), {})
        spectators.append(spectator)
        out.sum().backward()
        del out
        spectators.clear()
        region.conductor = None
        return spectator

    return spectate


def random_function(seed: int) -> Callable[..., Tensor]:
    """A function of tensors (6, 8), (8, 8) with writes in place, several outputs, views and broadcasts."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        rng = Random(seed)
        made = [x * 1.5]
        for _ in range(rng.randint(3, 9)):
            a, b = rng.choice(made), rng.choice(made)
            kind = rng.randrange(9)
            if kind == 0:
                made.append((a @ w).tanh())
            elif kind == 1:
                made.append(a * b)
            elif kind == 2:
                made.append(F.layer_norm(a, (8,), w[0], None))
            elif kind == 3:
                made.append(a + a.mean(-1, keepdim=True).exp() * b)
            elif kind == 4:
                made.append((a + b).sin().mul_(2.0).relu_())
            elif kind == 5:
                made.append(a.amax(-1, keepdim=True) * a.chunk(2, dim=-1)[0].repeat(1, 2).sigmoid())
            elif kind == 6:
                made.append(F.dropout(a, 0.5))
            elif kind == 7:
                made.append(torch.cat([a[:3].cos(), b[3:].clone()]))
            else:
                values, _ = a.sort(-1)
                made.append(values.add_(b))
        return torch.stack([m.sum() for m in made[-2:]]).prod()

    return f


@pytest.mark.parametrize("seed", range(40))
def test_the_tape_in_numbers_is_the_tape(seed: int, spectate: Callable[..., Spectator]) -> None:
    rng = Random(seed)
    x, w = torch.randn(6, 8, requires_grad=True), torch.nn.Parameter(torch.randn(8, 8))
    keep = frozenset(v for v in range(60) if rng.random() < (0.0, 0.15, 0.4, 0.8)[seed % 4])
    seen = spectate(random_function(seed), [x, w], keep)
    profile = profile_of(seen.program)
    interpreter = Interpreter(profile, FREE)
    tape = _Tape(interpreter, sum(1 << v for v in seen.program.keeps))
    for slot in seen.early:
        tape.release(slot)
    swept = 0
    for kind, slot, held, cached in seen.events:
        passage = tape.ask(slot) if kind == "ask" else tape.release(slot)
        assert set(members(tape.held)) == held, (kind, slot)
        assert set(members(tape.cached)) == cached, (kind, slot)
        if kind == "ask":
            assert list(passage.sweep) == seen.sweeps[swept], (kind, slot)
            swept += 1
    assert tape.level_bytes == 0
    assert tape.replayed == seen.program.replays > 0 or keep
