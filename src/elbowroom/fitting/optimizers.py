"""What the optimizer's step takes: watched once after each metered backward, through torch's hooks on optimizers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from elbowroom.errors import UsageError
from elbowroom.fitting.memory import Meter
from elbowroom.fitting.watching import StepWatch


class OptimizerWatch:
    """Between the end of a metered backward and the optimizer's step (or the next forward) it listens; then not."""

    def __init__(self) -> None:
        self.transient_bytes = 0  # the highest of a step beyond the state that it made and that stays
        self.last_peak_bytes = 0  # of the step just watched, state made included
        self._handles: list[Any] = []
        self._meter: Meter | None = None
        self._version: int | None = None
        self._written = False

    def await_step(self, model: Any, watch: StepWatch) -> None:
        """``model``: a weak reference; only steps of an optimizer over its parameters count. ``watch`` has seen enough
        and is stopped for it.
        """
        self.stop_waiting()
        self.last_peak_bytes = 0

        is_done = False

        def begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if self._meter is None and not is_done and _is_over(optimizer, model()):
                watch.stop()
                if not Meter.busy(watch.meter.device):
                    self._meter = Meter(watch.meter.device, collect_garbage=False)
                    self._meter.start()

        def ended(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            nonlocal is_done  # torch runs over its hooks now: they cannot be removed here
            if self._meter is not None and _is_over(optimizer, model()):
                is_done = True
                meter = self._stopped_meter()
                if hasattr(meter, "peak_bytes"):  # else somebody's profiler took over
                    self.last_peak_bytes = max(self.last_peak_bytes, meter.peak_bytes)
                    self.transient_bytes = max(self.transient_bytes, meter.peak_bytes - max(0, meter.end_bytes))

        self._handles = [register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(ended)]

    def stop_waiting(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._meter is not None:
            self._stopped_meter()

    def _stopped_meter(self) -> Meter:
        meter, self._meter = self._meter, None
        assert meter is not None
        with contextlib.suppress(UsageError):
            meter.stop()
        return meter

    def changed_what_rests(self, model: Module) -> bool:
        """Whether parameters were written for the first time since we looked: optimizer state may be born."""
        version = next((p._version for p in model.parameters() if p.requires_grad), 0)
        before, self._version = self._version, version
        if self._written or before is None or before == version:
            return False
        self._written = True
        return True


def _is_over(optimizer: torch.optim.Optimizer, model: Module | None) -> bool:
    if model is None:
        return False
    ours = {id(p) for p in model.parameters()}
    return any(id(p) in ours for group in optimizer.param_groups for p in group["params"])
