"""Programs and steps for the planner's tests: small random ones, and big ones that look like a transformer's."""

from __future__ import annotations

from dataclasses import replace
from random import Random

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
    digest_of,
)

COSTS = EngineCosts(record_s=0.01, replay_s=0.02, slot_s=0.005)
FREE = EngineCosts(0.0, 0.0, 0.0)


# Small and random ----------------------------------------------------------------------------------------------------


def random_program(rng: Random, max_values: int = 9, *, with_writes: bool = True) -> ProgramProfile:
    """A program of at most ``max_values`` values: several sources, outputs, readers; writes and opaque values, too."""
    values = [ValueProfile(SOURCE, -1, rng.choice([0, 3, 8, 20]), "x")]
    if rng.random() < 0.6:
        values.append(ValueProfile(PARAMETER, -1, 0, "weight"))
    if max_values > 4 and rng.random() < 0.3:
        values.append(ValueProfile(SOURCE, -1, rng.randint(1, 20), "mask"))
    readable = list(range(len(values)))
    operators: list[OperatorProfile] = []
    while len(values) < max_values and (not operators or rng.random() < 0.9):
        k = len(operators)
        reads = set(rng.sample(readable, min(len(readable), rng.randint(1, 3))))
        outputs, writes = [], []
        kind = OPAQUE if rng.random() < 0.08 else MADE
        writable = [v for v in readable if values[v].kind in (MADE, SOURCE)]
        if with_writes and operators and writable and rng.random() < 0.15:
            old = rng.choice(writable)
            needed = rng.random() < 0.6
            reads = (reads | {old}) if needed else (reads - {old})
            readable.remove(old)
            writes.append((old, len(values), needed))
            values.append(ValueProfile(kind, k, values[old].nbytes or rng.randint(1, 20)))
        else:
            for _ in range(1 if rng.random() < 0.8 else 2):
                if len(values) < max_values:
                    outputs.append(len(values))
                    values.append(ValueProfile(kind, k, rng.randint(0, 40)))
        operators.append(
            OperatorProfile(
                f"op{k}", tuple(sorted(reads)), tuple(outputs), tuple(writes), rng.randint(0, 30) / 10,
                rng.choice([0, 0, 5, 30]),
            )
        )  # fmt: skip
        readable += operators[-1].made
    slots = _random_slots(rng, readable)
    events = _random_events(rng, slots)
    digest = digest_of((operators, values, slots, events))
    return ProgramProfile(digest, "block", tuple(operators), tuple(values), slots, events, rng.randint(1, 50) / 10)


def _random_slots(rng: Random, readable: list[int]) -> tuple[int, ...]:
    """What autograd saved, in the order of the forward; a value may be saved several times, a slot may have none."""
    slots = [v for v in readable for _ in range(rng.choice([0, 1, 1, 2]))]
    if rng.random() < 0.1:
        slots.append(-1)
    return tuple(slots)


def _random_events(rng: Random, slots: tuple[int, ...]) -> tuple[BackwardEvent, ...]:
    """Nodes of one to three slots, last first: each asks for its slots, works, and lets go of them."""
    order = list(range(len(slots)))[::-1]
    if rng.random() < 0.3:
        rng.shuffle(order)
    script: list[tuple[str, int]] = []
    while order:
        node = [order.pop(0) for _ in range(min(len(order), rng.randint(1, 3)))]
        asked = [i for i in node if slots[i] >= 0 and rng.random() < 0.95]
        script += [(ASK, i) for i in asked]
        script += [(RELEASE, i) for i in node if rng.random() < 0.97]
    events = []
    level = 0
    for kind, slot in script:
        events.append(BackwardEvent(kind, slot, level, level + rng.choice([0, 4, 25]), rng.randint(0, 20) / 10))
        level += rng.choice([0, 0, 5, -3])
    return tuple(events)


def random_step(rng: Random, *, max_calls: int = 4, max_values: int = 7) -> StepProfile:
    """A step of a few calls of one to three programs, with gaps, shared storages and calls without a backward."""
    programs = tuple(random_program(rng, max_values) for _ in range(rng.randint(1, 3)))
    calls: list[CallProfile] = []
    for j in range(rng.randint(1, max_calls)):
        calls.append(CallProfile(f"blocks.{j}", rng.randrange(len(programs))))
    if rng.random() < 0.5:
        calls = _chained(calls, programs)
    moments: list[Moment] = []
    level = rng.randint(0, 20)
    for j in range(len(calls)):
        moments.append(Moment(FORWARD, j, level, 0, 0.0))
        if rng.random() < 0.3:
            level += rng.randint(0, 10)
            moments.append(Moment(GAP, -1, level, level + rng.randint(0, 30), 0.5, f"between {j} and {j + 1}"))
    level += rng.randint(0, 30)
    moments.append(Moment(GAP, -1, level, level + rng.randint(0, 80), 2.0, "head and loss"))
    for j in reversed(range(len(calls))):
        if rng.random() < 0.95:
            moments.append(Moment(BACKWARD, j, level, 0, 0.0))
            level += rng.randint(0, 15)
    moments.append(Moment(GAP, -1, level, level, 0.1, "end"))
    return StepProfile("random", "cpu", rng.randint(0, 100), programs, tuple(calls), tuple(moments), COSTS)


def _chained(calls: list[CallProfile], programs: tuple[ProgramProfile, ...]) -> list[CallProfile]:
    """The last made value of a call is the first source of the next one, where their bytes are equal or 0."""
    chained = []
    for j, call in enumerate(calls):
        storages = []
        values = programs[call.program].values
        if j + 1 < len(calls) and values[-1].kind == MADE:
            storages.append((len(values) - 1, j + 1))
        if j and programs[calls[j - 1].program].values[-1].kind == MADE:
            storages.append((0, j))
        chained.append(replace(call, storages=tuple(storages)))
    return chained


def programs(max_values: int = 9, *, with_writes: bool = True) -> st.SearchStrategy[ProgramProfile]:
    """Random programs."""
    return st.randoms(use_true_random=False).map(lambda r: random_program(r, max_values, with_writes=with_writes))


def steps(max_calls: int = 4, max_values: int = 7) -> st.SearchStrategy[StepProfile]:
    """Random steps."""
    return st.randoms(use_true_random=False).map(lambda r: random_step(r, max_calls=max_calls, max_values=max_values))


# Big and regular -----------------------------------------------------------------------------------------------------


class _Writer:
    """Writes a program operator by operator; sizes in elements of ``item`` bytes, times from bytes and flops."""

    def __init__(self) -> None:
        self.values: list[ValueProfile] = []
        self.operators: list[OperatorProfile] = []
        self.slots: list[int] = []
        self.nodes: list[tuple[int, ...]] = []  # slots of each autograd node, in forward order

    def source(self, kind: str, nbytes: int, name: str) -> int:
        self.values.append(ValueProfile(kind, -1, nbytes, name))
        return len(self.values) - 1

    def run(
        self, name: str, reads: tuple[int, ...], sizes: tuple[int, ...], flops: float = 0.0, saves: tuple[int, ...] = ()
    ) -> int:
        """Returns its first output. ``saves``: value numbers; negative ones are its own outputs, -1 the first."""
        first = len(self.values)
        k = len(self.operators)
        moved = sum(sizes) + sum(self.values[v].nbytes for v in reads)
        self.values += [ValueProfile(MADE, k, n) for n in sizes]
        outputs = tuple(range(first, len(self.values)))
        self.operators.append(OperatorProfile(name, reads, outputs, (), moved / 20e9 + flops / 500e9, 0))
        if saves:
            node = tuple(range(len(self.slots), len(self.slots) + len(saves)))
            self.slots += [v if v >= 0 else first - 1 - v for v in saves]
            self.nodes.append(node)
        return first

    def program(self, name: str) -> ProgramProfile:
        events = []
        level = 0
        for node in reversed(self.nodes):
            work = max(self.values[self.slots[i]].nbytes for i in node)
            for kind in (ASK, RELEASE):
                for i in node:
                    busy = kind == ASK and i == node[-1]
                    peak = level + (2 * work if busy else 0)
                    events.append(BackwardEvent(kind, i, level, peak, work / 5e9 if busy else 0.0))
            level += 4096
        forward_s = sum(o.seconds for o in self.operators)
        values, operators, slots = tuple(self.values), tuple(self.operators), tuple(self.slots)
        return ProgramProfile(digest_of((operators, values)), name, operators, values, slots, tuple(events), forward_s)


def gpt_like_program(n_values: int = 60, tokens: int = 2048, width: int = 256, name: str = "Block") -> ProgramProfile:
    """A transformer block under autocast with ``n_values`` values, 50 or more: attention, MLP, elementwise work."""
    w = _Writer()
    wide, half = 4 * tokens * width, 2 * tokens * width
    x = w.source(SOURCE, wide, "x")
    names = ("ln_1", "qkv", "proj", "ln_2", "fc", "out")
    weights = {n: (w.source(PARAMETER, 0, f"{n}.weight"), w.source(PARAMETER, 0, f"{n}.bias")) for n in names}

    def norm(name: str, x: int) -> int:
        return w.run("native_layer_norm", (x, *weights[name]), (wide, 4 * tokens, 4 * tokens), saves=(x, -2, -3))

    def linear(name: str, x: int, rows: int, columns: int) -> int:
        weight = w.run("_to_copy", weights[name][:1], (2 * rows * columns,))
        bias = w.run("_to_copy", weights[name][1:], (2 * columns,))
        flops = 2.0 * tokens * rows * columns
        return w.run("addmm", (bias, x, weight), (2 * tokens * columns,), flops=flops, saves=(x, weight))

    def dropout(x: int) -> int:
        mask = w.run("bernoulli", (x,), (half,))
        return w.run("mul", (x, mask), (half,), saves=(mask,))

    h = linear("qkv", w.run("_to_copy", (norm("ln_1", x),), (half,)), width, 3 * width)
    q, k, v = (w.run("clone", (h,), (half,)) for _ in range(3))
    h = w.run(
        "attention", (q, k, v), (half, 4 * tokens * 8, 8, 8), flops=4.0 * tokens * 1024 * width,
        saves=(q, k, v, -1, -2, -3, -4),
    )  # fmt: skip
    h = dropout(linear("proj", w.run("clone", (h,), (half,)), width, width))
    x = w.run("add", (x, h), (wide,))
    h = linear("fc", w.run("_to_copy", (norm("ln_2", x),), (half,)), width, 4 * width)
    h = linear("out", w.run("gelu", (h,), (4 * half,), saves=(h,)), 4 * width, width)
    x = w.run("add", (x, dropout(h)), (wide,))
    while len(w.values) < n_values:
        x = w.run(("sin", "tanh", "exp")[len(w.values) % 3], (x,), (wide,), saves=(x if len(w.values) % 2 else -1,))
    return w.program(name)


def gpt_like_step(n_blocks: int, n_values: int = 60) -> StepProfile:
    """``n_blocks`` calls of one program, forward, a head, backward."""
    return _stacked((gpt_like_program(n_values),), [0] * n_blocks)


def distinct_step(n_programs: int, n_values: int = 60) -> StepProfile:
    """As ``gpt_like_step``, each call with a program of its own."""
    programs = tuple(
        gpt_like_program(n_values, tokens=1024 + 32 * i, width=128 + 8 * (i % 17), name=f"Block{i}")
        for i in range(n_programs)
    )
    return _stacked(programs, list(range(n_programs)))


def _stacked(programs: tuple[ProgramProfile, ...], order: list[int]) -> StepProfile:
    calls = []
    for j, p in enumerate(order):
        last = max(v for v, value in enumerate(programs[p].values) if value.kind == MADE)
        shared = order[max(0, j - 1)] == p  # other widths: no storage in common
        calls.append(CallProfile(f"blocks.{j}", p, ((last, j + 1), (0, j)) if shared else ((last, j + 1),)))
    moments = [Moment(FORWARD, j, 0, 0, 0.0) for j in range(len(order))]
    moments.append(Moment(GAP, -1, 1 << 20, 16 << 20, 0.02, "head and loss"))
    level = 1 << 20
    for j in reversed(range(len(order))):
        moments.append(Moment(BACKWARD, j, level, 0, 0.0))
        level += 1 << 20
    return StepProfile("gpt", "cpu", 100 << 20, programs, tuple(calls), tuple(moments), EngineCosts(8e-6, 1e-5, 1e-6))
