"""What a training step is made of, in bytes and seconds: the planner's only input. Plain numbers, JSON in and out.

A *program* is what region calls with the same operators share. A *step* is the order in which its region calls ran
forward and backward, and what the rest of the model did between them. Bytes are of two kinds:

- *tape bytes* hang on the plan: what a region call keeps, replays and caches. They are never in a profile; whoever
  reads it works them out from a plan (``simulate``).
- *base bytes* do not: gradients, what the head keeps, temporaries of backward kernels. They are measured in the
  profiled step, and the tape bytes of that step (which kept nothing) are taken off.

At every moment of every plan the step takes ``resting + base + tape bytes``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

SOURCE = "source"  # the region did not make it: input, buffer, closure tensor; held whenever something needs it
PARAMETER = "parameter"  # never counted: it is there anyway
MADE = "made"  # an operator made it: keep or replay
OPAQUE = "opaque"  # cannot be replayed: held whenever something needs it

ASK = "ask"  # backward asks for what a slot saved
RELEASE = "release"  # autograd let go of the slot

FORWARD = "forward"
BACKWARD = "backward"
GAP = "gap"


@dataclass(frozen=True)
class ValueProfile:
    """One value. ``nbytes`` is what holding it costs: 0 for parameters, and for sources that others hold anyway."""

    kind: str
    maker: int  # index of the operator that made it, -1 if none did
    nbytes: int
    name: str = ""


@dataclass(frozen=True)
class OperatorProfile:
    """One recorded operator.

    ``reads``: values it needs. ``outputs``: values it made in fresh storages. ``writes``: (old value, new value,
    whether the old content is needed): a replay writes to a copy of the old storage. ``seconds``: median over the
    calls of the profiled step. ``transient_bytes``: what it took at its highest beyond its outputs.
    """

    name: str
    reads: tuple[int, ...]
    outputs: tuple[int, ...]
    writes: tuple[tuple[int, int, bool], ...]
    seconds: float
    transient_bytes: int = 0
    module: str = ""
    line: str = ""

    @property
    def made(self) -> Iterator[int]:
        """Values it made, new versions of written ones included."""
        yield from self.outputs
        for _, new, _ in self.writes:
            yield new


@dataclass(frozen=True)
class BackwardEvent:
    """Something that happened to a slot while the call's backward ran, and the base bytes from then on.

    Bytes are relative to the base bytes when the call's backward began. ``level_bytes``: at the event, before it.
    ``peak_bytes``: the highest from the event (for ASK: from when the value was there) to the next event.
    ``seconds``: from the event (ASK: the value there) to the next event.
    """

    kind: str  # ASK or RELEASE
    slot: int
    level_bytes: int
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class ProgramProfile:
    """What region calls with the same operators share. ``slots[i]`` is the value that slot ``i`` asks for, -1 if none.

    ``forward_s``: the region's forward without recording. ``digest`` is equal for equal operator sequences.
    """

    digest: str
    name: str
    operators: tuple[OperatorProfile, ...]
    values: tuple[ValueProfile, ...]
    slots: tuple[int, ...]
    events: tuple[BackwardEvent, ...]
    forward_s: float

    @property
    def saved(self) -> frozenset[int]:
        """The values that plain autograd would hold."""
        return frozenset(v for v in self.slots if v >= 0)


@dataclass(frozen=True)
class CallProfile:
    """One call of a region. ``storages``: (value, step-wide id) of values whose storage other calls know, too.

    A value made by one call and read as a source by the next has the same id in both: held by both, it is there once.
    """

    region: str
    program: int  # index into StepProfile.programs
    storages: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Moment:
    """One part of the step, in order of time: a region call's forward or backward, or what came between two of them.

    ``level_bytes``: base bytes when it began; a forward's or backward's own come from its program, on top of this.
    ``peak_bytes``: GAP only, the highest base bytes while it lasted. ``seconds``: GAP only.
    """

    kind: str  # FORWARD, BACKWARD, GAP
    call: int  # index into StepProfile.calls, -1 for a gap
    level_bytes: int
    peak_bytes: int
    seconds: float
    label: str = ""


@dataclass(frozen=True)
class EngineCosts:
    """What checkpointing itself takes, seconds: recording an operator, replaying one (beyond its own time), a slot."""

    record_s: float
    replay_s: float
    slot_s: float


@dataclass(frozen=True)
class StepProfile:
    """A whole step: forward of its first region call to the end of what follows its backward.

    ``resting_bytes`` are alive when it begins. ``fingerprint`` names model and input shapes.
    """

    fingerprint: str
    device: str
    resting_bytes: int
    programs: tuple[ProgramProfile, ...]
    calls: tuple[CallProfile, ...]
    moments: tuple[Moment, ...]
    costs: EngineCosts

    def program_of(self, call: int) -> ProgramProfile:
        """The program of the step's call number ``call``."""
        return self.programs[self.calls[call].program]

    @property
    def plain_s(self) -> float:
        """Seconds of the step without any checkpointing."""
        backward_s = [sum(e.seconds for e in p.events) for p in self.programs]
        calls = sum(self.programs[c.program].forward_s + backward_s[c.program] for c in self.calls)
        return calls + sum(m.seconds for m in self.moments if m.kind == GAP)

    def to_json(self) -> str:
        """The profile as JSON text; ``from_json`` reads it back equal."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> StepProfile:
        """The inverse of ``to_json``."""
        tree = json.loads(text)
        return StepProfile(
            **tree
            | {
                "programs": tuple(_program(p) for p in tree["programs"]),
                "calls": tuple(
                    CallProfile(**c | {"storages": tuple(tuple(s) for s in c["storages"])}) for c in tree["calls"]
                ),
                "moments": tuple(Moment(**m) for m in tree["moments"]),
                "costs": EngineCosts(**tree["costs"]),
            }
        )


def digest_of(parts: Any) -> str:
    """A short name for nested tuples of strings and numbers; equal parts, equal name."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _program(tree: dict[str, Any]) -> ProgramProfile:
    return ProgramProfile(
        **tree
        | {
            "operators": tuple(_operator(o) for o in tree["operators"]),
            "values": tuple(ValueProfile(**v) for v in tree["values"]),
            "slots": tuple(tree["slots"]),
            "events": tuple(BackwardEvent(**e) for e in tree["events"]),
        }
    )


def _operator(tree: dict[str, Any]) -> OperatorProfile:
    return OperatorProfile(
        **tree
        | {
            "reads": tuple(tree["reads"]),
            "outputs": tuple(tree["outputs"]),
            "writes": tuple((old, new, bool(needed)) for old, new, needed in tree["writes"]),
        }
    )
