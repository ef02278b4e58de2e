"""Elbowroom: train PyTorch models in the memory you have."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elbowroom.core import policies
    from elbowroom.core.checkpoint import checkpoint, name, unwrap, wrap
    from elbowroom.core.functions import replayable
    from elbowroom.core.inspection import Proof, Saved, proof, saved
    from elbowroom.errors import (
        ChangedTensorError,
        ElbowroomError,
        InfeasibleBudgetError,
        PlanMismatchError,
        ProofError,
        ReplayError,
        UsageError,
    )
    from elbowroom.fitting.fit import fit, plan, unfit
    from elbowroom.fitting.memory import Meter, memory_report
    from elbowroom.fitting.report import Report, report
    from elbowroom.planning.plan import Plan

__version__ = "0.1.0"
__all__ = [
    "ChangedTensorError",
    "ElbowroomError",
    "InfeasibleBudgetError",
    "Meter",
    "Plan",
    "PlanMismatchError",
    "Proof",
    "ProofError",
    "ReplayError",
    "Report",
    "Saved",
    "UsageError",
    "checkpoint",
    "fit",
    "memory_report",
    "name",
    "plan",
    "policies",
    "proof",
    "replayable",
    "report",
    "saved",
    "unfit",
    "unwrap",
    "wrap",
]

_HOMES = {
    "core.checkpoint": ("checkpoint", "name", "unwrap", "wrap"),
    "core.functions": ("replayable",),
    "core.inspection": ("Proof", "Saved", "proof", "saved"),
    "errors": (
        "ChangedTensorError", "ElbowroomError", "InfeasibleBudgetError", "PlanMismatchError", "ProofError",
        "ReplayError", "UsageError",
    ),
    "fitting.fit": ("fit", "plan", "unfit"),
    "fitting.memory": ("Meter", "memory_report"),
    "fitting.report": ("Report", "report"),
    "planning.plan": ("Plan",),
}
_HOME_OF = {public: f"elbowroom.{home}" for home, names in _HOMES.items() for public in names}


def __getattr__(public: str) -> Any:
    """Public names load when first used: torch takes seconds to import, and ``elbowroom --help`` needs none of it."""
    if public == "policies":
        return importlib.import_module("elbowroom.core.policies")
    if public not in _HOME_OF:
        raise AttributeError(f"module 'elbowroom' has no attribute {public!r}")
    value = globals()[public] = getattr(importlib.import_module(_HOME_OF[public]), public)
    return value
