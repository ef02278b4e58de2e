"""The sanity check: the same steps plain and checkpointed, and everything they leave compared bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path

from elbowroom.core.checkpoint import wrap
from elbowroom.core.inspection import Proof, proof
from elbowroom.errors import UsageError
from elbowroom.fitting.measure import measure_steps
from elbowroom.fitting.regions import find_regions
from elbowroom.training.candidates import Candidate, built, candidate_builder, seed_everything
from elbowroom.training.config import CheckConfig, checked_comparison
from elbowroom.training.cost import cost_dict
from elbowroom.training.run import usable_device

# What a step leaves: names to tensors (or other values that can be compared).
Outcome = dict[str, Any]

_LEARNING_RATE = 0.01


def check(config: CheckConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Compares ``config.steps`` steps of the model plain and checkpointed; ``say`` hears what is under way.

    Each step: forward, loss, backward, and a plain gradient descent update, from the same random streams.
    Compared: outputs, loss, every gradient, every parameter and buffer afterwards, and every generator's
    state. Then, if all is equal, one step of each is measured. Raises UsageError for what cannot be checked.
    """
    checked_comparison(config)
    device = usable_device(config.device)
    # Dropout on: random operators are where re-running goes wrong.
    build = candidate_builder(
        config.model, batch_size=config.micro_batch_size, sequence_length=config.sequence_length, dropout=0.1
    )
    plain, checkpointed = (built(build, config.seed, device) for _ in range(2))
    _same_start(plain, checkpointed, config.model)
    regions = find_regions(checkpointed.model)
    for region in regions.values():
        wrap(region, keep=config.keep, verify=config.verify)

    difference, outcome, n_compared = None, {}, 0
    for step in range(config.steps):
        say(f"comparing step {step + 1} of {config.steps}")
        n_compared += 1
        outcome = _plain_outcome(plain, config, step)
        difference = _checkpointed_difference(checkpointed, config, step, outcome)
        if difference is not None:
            difference = f"step {step + 1}: {difference}"
            break
    cost = None
    if difference is None:
        say("measuring one step of each")
        cost = _cost(plain, checkpointed, config, device)
    return {
        "model": config.model,
        "equal": difference is None,
        "first_difference": difference,
        "steps": n_compared,
        "n_gradients": sum(name.startswith("gradient of ") for name in outcome),
        "n_buffers": sum(name.startswith("buffer ") for name in outcome),
        "n_regions": len(regions),
        "step_cost": cost,
        "proof": _proof_dict(proof(checkpointed.model)),
    }


def take_step(candidate: Candidate, config: CheckConfig, step: int) -> Outcome:
    """One step of ``candidate`` from the random streams of step number ``step``, and all that it leaves."""
    seed_everything(config.seed + 1 + step)
    device_type = next(iter(_tensors(candidate))).device.type
    with torch.autocast(device_type, torch.bfloat16, enabled=config.precision == "bf16"):
        output = candidate.forward()
        loss = candidate.loss_fn(output)
    torch.autograd.backward(loss)
    outcome: Outcome = {
        f"output{keystr(path)}": leaf for path, leaf in tree_leaves_with_path(output) if isinstance(leaf, Tensor)
    }
    outcome["loss"] = loss
    named = list(candidate.model.named_parameters())
    outcome |= {f"gradient of {name}": parameter.grad for name, parameter in named}
    for path, leaf in tree_leaves_with_path(candidate.inputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            outcome[f"gradient of input{keystr(path)}"], leaf.grad = leaf.grad, None
    with torch.no_grad():
        for _, parameter in named:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=_LEARNING_RATE)
                parameter.grad = None
    outcome |= {f"parameter {name}": parameter.detach().clone() for name, parameter in named}
    outcome |= {f"buffer {name}": buffer.clone() for name, buffer in candidate.model.named_buffers()}
    return outcome | dict(_generator_states())


def first_difference(expected: Outcome, found: Outcome) -> str | None:
    """The first thing that differs, named, and by how much; None if all is equal bit for bit."""
    for name, wanted in expected.items():
        if name not in found:
            return f"{name} is missing in the checkpointed run"
        difference = _difference(wanted, found[name])
        if difference is not None:
            return f"{name} differs: {difference}"
    extra = next((name for name in found if name not in expected), None)
    return None if extra is None else f"{extra} is there in the checkpointed run only"


def _difference(wanted: Any, found: Any) -> str | None:
    """How ``found`` (checkpointed) differs from ``wanted`` (plain), in words; None if it does not."""
    if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
        if wanted is None or found is None:
            return None if wanted is found else f"{_kind(wanted)} when plain, {_kind(found)} when checkpointed"
        return None if wanted == found else "the random stream stands elsewhere"
    if (wanted.shape, wanted.dtype) != (found.shape, found.dtype):
        return f"{_kind(wanted)} when plain, {_kind(found)} when checkpointed"
    same = _bits(wanted) == _bits(found)
    if bool(same.all()):
        return None
    n_different = int((~same.view(wanted.numel(), -1).all(dim=1)).sum())
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    by = (wanted.to(wide) - found.to(wide)).abs().max().item()
    return f"{n_different} of {wanted.numel()} elements, by {by:.3g} at most"


def _kind(thing: Any) -> str:
    return f"{thing.dtype} {tuple(thing.shape)}" if isinstance(thing, Tensor) else "none"


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: -0.0 and 0.0 differ, a NaN equals the same NaN."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def _generator_states() -> Iterator[tuple[str, Any]]:
    yield "generator of Python", random.getstate()
    kind, keys, *rest = np.random.get_state()
    yield "generator of NumPy", (kind, np.asarray(keys).tobytes(), *rest)
    yield "generator of torch", torch.get_rng_state()
    if torch.cuda.is_available():
        for number, state in enumerate(torch.cuda.get_rng_state_all()):
            yield f"generator of cuda:{number}", state


def _tensors(candidate: Candidate) -> Iterator[Tensor]:
    yield from candidate.model.parameters()
    yield from candidate.model.buffers()
    for _, leaf in tree_leaves_with_path(candidate.inputs):
        if isinstance(leaf, Tensor):
            yield leaf


def _same_start(plain: Candidate, checkpointed: Candidate, asked: str) -> None:
    if plain.model is checkpointed.model:
        raise UsageError(f"--model {asked}: two calls returned the same model; build it inside the function")
    if not any(parameter.requires_grad for parameter in plain.model.parameters()):
        raise UsageError(f"--model {asked}: no parameter of the model takes gradients: nothing to check")
    ours, theirs = list(_tensors(plain)), list(_tensors(checkpointed))
    if len(ours) != len(theirs) or any(_difference(a, b) is not None for a, b in zip(ours, theirs, strict=True)):
        raise UsageError(
            f"--model {asked}: two calls with the same seeds built different models or inputs; draw only "
            f"from torch, numpy.random and random in the function: they are seeded before each call"
        )


def _plain_outcome(plain: Candidate, config: CheckConfig, step: int) -> Outcome:
    try:
        return take_step(plain, config, step)
    except UsageError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"--model {config.model}: fails already when plain: {what}") from error


def _checkpointed_difference(checkpointed: Candidate, config: CheckConfig, step: int, expected: Outcome) -> str | None:
    try:
        found = take_step(checkpointed, config, step)
    except Exception as error:
        return f"only the checkpointed step fails: {type(error).__name__}: {error}"
    return first_difference(expected, found)


def _cost(plain: Candidate, checkpointed: Candidate, config: CheckConfig, device: torch.device) -> dict[str, Any]:
    def step_of(candidate: Candidate) -> Callable[[], None]:
        def step() -> None:
            seed_everything(config.seed)
            torch.autograd.backward(candidate.loss(device, config.precision))
            candidate.model.zero_grad()

        return step

    steps = {"plain": step_of(plain), "checkpointed": step_of(checkpointed)}
    return cost_dict(measure_steps(steps, device))


def _proof_dict(found: Proof) -> dict[str, Any]:
    return {
        "operators": found.operators,
        "proved": found.proved,
        "kept": [
            {"operator": str(row.operator), "line": str(row.line), "nbytes": row.nbytes, "why": str(row.why)}
            for row in found.kept
        ],
    }
