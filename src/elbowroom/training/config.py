"""Everything a training run is told, as one tree of frozen dataclasses.

The command line is made from it: each field is a flag, each docstring its help. Imports neither torch nor the
model, so that ``elbowroom --help`` answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from elbowroom.errors import UsageError

Preset = Literal["tiny", "small", "medium", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
ReadyPolicy = Literal["nothing", "everything", "matmuls", "attention"]
Precision = Literal["fp32", "bf16"]

_MODEL = tyro.conf.arg(metavar="PRESET|FILE.py:FUNCTION")
_BUDGET = tyro.conf.arg(metavar="BYTES|PERCENT|max")


@dataclass(frozen=True)
class ModelConfig:
    """Which GPT."""

    preset: Annotated[Preset, tyro.conf.arg(name="model")] = "tiny"
    """size of the GPT; the gpt2 sizes are those of GPT-2"""
    sequence_length: int | None = None
    """tokens per sequence (None: that of the model, 128 for tiny)"""
    dropout: float | None = None
    """probability of dropping a value (None: that of the preset)"""
    positions: Literal["learned", "rotary"] | None = None
    """how the model knows where a token stands (None: as the preset does)"""


@dataclass(frozen=True)
class DataConfig:
    """Which tokens, and how many at once."""

    path: Annotated[Path | None, tyro.conf.arg(name="data", metavar="PATH")] = None
    """a folder of text files, one text file, or a .bin of uint16 tokens (None: the source text of this
    Python's standard library, as bytes)"""
    micro_batch_size: int = 16
    """sequences per step"""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up and a cosine down to a tenth of the learning rate."""

    learning_rate: float = 3e-3
    """highest learning rate, reached at the end of the warm-up"""
    warmup_steps: int = 20
    """steps over which the learning rate rises from zero"""
    weight_decay: float = 0.1
    """decay of matrices per step, times the learning rate; biases and norms are not decayed"""
    gradient_clip: float = 1.0
    """largest allowed norm of all gradients together"""


@dataclass(frozen=True)
class MemoryConfig:
    """What is kept of the forward: by a byte budget, or by hand."""

    budget: Annotated[str | None, _BUDGET] = None
    """most bytes that one whole step may take, parameters and optimizer state included: 800MiB, 6GiB, 85% (of the
    device's memory), or max; what is kept is then planned, at the least extra time (None: nothing is planned)"""
    activation_checkpointing: Annotated[
        Literal["auto", "full", "none"], tyro.conf.arg(aliases=["--gradient-checkpointing"])
    ] = "auto"
    """full: every block of the model replays in backward what it did not keep; none: plain autograd; auto: as planned
    where there is a budget, else full"""
    keep: Literal["auto", "nothing", "everything", "matmuls", "attention"] = "auto"
    """which values checkpointed blocks keep, besides their inputs; auto: as planned where there is a budget, else
    nothing"""

    @property
    def mode(self) -> Literal["planned", "full", "none"]:
        """How the model is trained: ``auto`` made definite."""
        if self.budget is not None:
            return "planned"
        return "full" if self.activation_checkpointing == "auto" else self.activation_checkpointing

    @property
    def policy(self) -> ReadyPolicy | None:
        """What checkpointed blocks keep; None where a plan decides."""
        if self.budget is not None:
            return None
        return "nothing" if self.keep == "auto" else self.keep


@dataclass(frozen=True)
class RunConfig:
    """How long, where, and what is written."""

    max_steps: int = 300
    """optimizer steps"""
    seed: int = 0
    """seed of weights, dropout, split and order of the data; the same seed gives the same losses"""
    device: str = "cpu"
    """device to train on: cpu, cuda, cuda:1, ..."""
    precision: Precision = "fp32"
    """fp32, or bf16 autocast with weights in fp32"""
    out_dir: Path = Path("runs")
    """folder of all runs"""
    run_name: str | None = None
    """folder of this run inside out-dir (None: date and time)"""
    log_every: int = 10
    """steps between two lines of metrics"""
    eval_every: int = 100
    """steps between two evaluations on the validation text (0: only at start and end)"""
    eval_batches: int = 8
    """batches per evaluation"""
    sample_tokens: int = 200
    """tokens of text to generate at the end (0: none)"""


@dataclass(frozen=True)
class TrainConfig:
    """A whole training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    run: RunConfig = field(default_factory=RunConfig)


def checked_run(config: TrainConfig) -> TrainConfig:
    """``config``, if its numbers make sense; else UsageError with the first flag that does not."""
    least = [
        ("--sequence-length", config.model.sequence_length, 1),
        ("--micro-batch-size", config.data.micro_batch_size, 1),
        ("--learning-rate", config.optimizer.learning_rate, 0),
        ("--warmup-steps", config.optimizer.warmup_steps, 0),
        ("--weight-decay", config.optimizer.weight_decay, 0),
        ("--gradient-clip", config.optimizer.gradient_clip, 0),
        ("--max-steps", config.run.max_steps, 1),
        ("--seed", config.run.seed, 0),
        ("--log-every", config.run.log_every, 1),
        ("--eval-every", config.run.eval_every, 0),
        ("--eval-batches", config.run.eval_batches, 1),
        ("--sample-tokens", config.run.sample_tokens, 0),
    ]
    _at_least(least)
    if config.model.dropout is not None and not 0 <= config.model.dropout < 1:
        raise UsageError(f"--dropout {config.model.dropout}: must be at least 0 and less than 1")
    _checked_memory(config.memory)
    name = config.run.run_name
    if name is not None and (not name or Path(name).name != name):
        raise UsageError(f"--run-name {name!r}: must be a plain folder name; folders go into --out-dir")
    return config


@dataclass(frozen=True)
class CheckConfig:
    """Whether checkpointing changes anything: plain against checkpointed, bit for bit."""

    model: Annotated[str, _MODEL] = "tiny"
    """a preset of elbowroom train (with dropout on), or a function in a file: it takes nothing and returns
    (model, inputs) or (model, inputs, loss_fn). inputs: a tensor, a tuple of arguments, or a dict of
    keyword arguments of the model. loss_fn: takes the model's output, returns a scalar tensor (without it:
    the mean of the squares of each floating-point tensor in the output, added up). It is called twice with
    the same seeds and must build the same model and inputs both times"""
    keep: ReadyPolicy = "nothing"
    """which values checkpointed regions keep, besides their inputs"""
    verify: Literal["first", "always", "never"] = "first"
    """when recorded operators are proved by replaying them at once: while a program is new, at every call,
    or never"""
    precision: Precision = "fp32"
    """fp32, or bf16 autocast with weights in fp32"""
    device: str = "cpu"
    """device to run on: cpu, cuda, cuda:1, ..."""
    steps: int = 3
    """training steps to compare"""
    micro_batch_size: int = 4
    """sequences per step, for presets"""
    sequence_length: int | None = None
    """tokens per sequence, for presets (None: that of the preset)"""
    seed: int = 0
    """seed of weights, inputs and dropout"""


def checked_comparison(config: CheckConfig) -> CheckConfig:
    """``config``, if its numbers make sense; else UsageError with the first flag that does not."""
    least = [
        ("--steps", config.steps, 1),
        ("--micro-batch-size", config.micro_batch_size, 1),
        ("--sequence-length", config.sequence_length, 1),
        ("--seed", config.seed, 0),
    ]
    _at_least(least)
    return config


@dataclass(frozen=True)
class PlanConfig:
    """What a budget buys: one training step is measured, plans are made for budgets of every size."""

    model: Annotated[str, _MODEL] = "tiny"
    """a preset of elbowroom train, or a function in a file: it takes nothing and returns (model, inputs) or (model,
    inputs, loss_fn), as for elbowroom check"""
    budget: Annotated[str | None, _BUDGET] = None
    """budget of the plan that is written: 800MiB, 6GiB, 85% (of the device's memory), or max (None: half way between
    the least that one step can do with and what it takes without help)"""
    device: str = "cpu"
    """device to plan for: cpu, cuda, cuda:1, ..."""
    precision: Precision = "fp32"
    """fp32, or bf16 autocast with weights in fp32"""
    micro_batch_size: int = 16
    """sequences per step, for presets"""
    sequence_length: int | None = None
    """tokens per sequence, for presets (None: that of the preset)"""
    optimizer: Literal["adamw", "none"] = "adamw"
    """what ends the step: AdamW, whose state counts, or nothing but gradients"""
    points: int = 23
    """budgets to plan for, in even steps from the least to what the step takes without help; the table shows a dozen"""
    plan_file: Annotated[Path, tyro.conf.arg(metavar="PATH")] = Path("plan.json")
    """where the plan is written; elbowroom.fit(model, plan=...) takes it"""
    picture: Annotated[Path, tyro.conf.arg(metavar="PATH")] = Path("plan.png")
    """where the picture is written: peak against step time, the plan marked"""
    timeline: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """where a second picture is written: bytes over the time of one step, with the plan and without (None: nowhere)"""
    seed: int = 0
    """seed of weights, inputs and dropout"""


def checked_planning(config: PlanConfig) -> PlanConfig:
    """``config``, if its numbers make sense; else UsageError with the first flag that does not."""
    least = [
        ("--micro-batch-size", config.micro_batch_size, 1),
        ("--sequence-length", config.sequence_length, 1),
        ("--points", config.points, 2),
        ("--seed", config.seed, 0),
    ]
    _at_least(least)
    return config


def _checked_memory(memory: MemoryConfig) -> None:
    if memory.budget is None:
        return
    for flag, value in (("--activation-checkpointing", memory.activation_checkpointing), ("--keep", memory.keep)):
        if value != "auto":
            raise UsageError(
                f"--budget {memory.budget} and {flag} {value} contradict each other: with a budget a plan decides what "
                f"each block keeps; leave out one of the two"
            )


def _at_least(numbers: Sequence[tuple[str, float | None, float]]) -> None:
    for flag, value, lowest in numbers:
        # "not >=" and not "<": NaN is refused too.
        if value is not None and not value >= lowest:
            raise UsageError(f"{flag} {value}: must be at least {lowest}")
