"""The models that ``check`` and ``plan`` are given: a preset, or whatever a function in a file builds."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from elbowroom.errors import UsageError
from elbowroom.models.gpt import GPT, PRESETS
from elbowroom.training.config import Precision


@dataclass(frozen=True)
class Candidate:
    """A model, its inputs and its loss, built anew by each call of ``build_candidate``."""

    model: nn.Module
    inputs: Any
    loss_fn: Callable[[Any], Tensor]

    def forward(self) -> Any:
        """The model's output on its inputs."""
        if isinstance(self.inputs, Mapping):
            return self.model(**self.inputs)
        if isinstance(self.inputs, tuple):
            return self.model(*self.inputs)
        return self.model(self.inputs)

    def loss(self, device: torch.device, precision: Precision) -> Tensor:
        """The loss of one forward, under autocast if the precision asks for it."""
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            return self.loss_fn(self.forward())

    def to(self, device: torch.device) -> Candidate:
        """The same on ``device``."""
        inputs = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, self.inputs)
        return Candidate(self.model.to(device), inputs, self.loss_fn)


def seed_everything(seed: int) -> None:
    """Python, NumPy and torch (all devices) start from ``seed``."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # what a model's own code draws from, if it draws from NumPy
    torch.manual_seed(seed)


def candidate_builder(
    model: str, *, batch_size: int, sequence_length: int | None, dropout: float | None = None
) -> Callable[[], Candidate]:
    """A function that builds the model that ``model`` names: a preset, or ``FILE.py:FUNCTION``.

    ``batch_size``, ``sequence_length`` and ``dropout`` are of presets (None: as the preset has it). Raises UsageError
    (also when what it returns is called) if there is no such thing.
    """
    if model in PRESETS:
        return lambda: _preset(model, batch_size, sequence_length, dropout)
    path, colon, function = model.rpartition(":")
    if not colon:
        presets = ", ".join(PRESETS)
        raise UsageError(f"--model {model}: neither a preset ({presets}) nor FILE.py:FUNCTION")
    module = _load(Path(path), model)
    if not callable(getattr(module, function, None)):
        raise UsageError(f"--model {model}: {path} has no function named {function}")
    return lambda: _from_function(getattr(module, function), model)


def default_loss(output: Any) -> Tensor:
    """The mean of the squares of each floating-point tensor in ``output`` that has gradients, added up."""
    parts = [
        leaf.float().square().mean()
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad
    ]
    if not parts:
        raise UsageError("the model's output holds no floating-point tensor with gradients; return a loss_fn as third")
    return torch.stack(parts).sum()


def built(build: Callable[[], Candidate], seed: int, device: torch.device) -> Candidate:
    """A new candidate on ``device``, everything random in it drawn from ``seed``."""
    seed_everything(seed)
    return build().to(device)


def _preset(name: str, batch_size: int, sequence_length: int | None, dropout: float | None) -> Candidate:
    preset = PRESETS[name]
    config = replace(
        preset,
        dropout=preset.dropout if dropout is None else dropout,
        sequence_length=sequence_length or preset.sequence_length,
    )
    model = GPT(config)
    tokens = torch.randint(config.vocabulary, (batch_size, config.sequence_length + 1))  # (B, T + 1)
    return Candidate(model, (tokens[:, :-1], tokens[:, 1:]), lambda output: output[1])


def _load(path: Path, asked: str) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"--model {asked}: no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--model {asked}: {path} is no Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    # As `python FILE.py` would find them: the file's neighbours, and itself by name (dataclasses ask for it).
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"--model {asked}: {path} cannot be imported: {in_one_line(error)}") from error
    return module


def _from_function(function: Callable[[], Any], asked: str) -> Candidate:
    try:
        made = function()
    except Exception as error:
        raise UsageError(f"--model {asked}: the function failed: {in_one_line(error)}") from error
    is_right = isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)
    if not is_right or (len(made) == 3 and not callable(made[2])):
        raise UsageError(f"--model {asked}: must return (model, inputs) or (model, inputs, loss_fn), got {_kind(made)}")
    return Candidate(made[0], made[1], made[2] if len(made) == 3 else default_loss)


def _kind(thing: object) -> str:
    if isinstance(thing, tuple):
        return f"({', '.join(type(part).__name__ for part in thing)})"
    return type(thing).__name__


def in_one_line(error: BaseException) -> str:
    """Kind and first line of an error."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
