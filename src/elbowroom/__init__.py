"""Elbowroom: train PyTorch models in the memory you have."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elbowroom.core import policies
    from elbowroom.core.checkpoint import checkpoint, name, unwrap, wrap
    from elbowroom.core.functions import replayable
    from elbowroom.core.inspection import Proof, Saved, proof, saved
    from elbowroom.errors import ChangedTensorError, ElbowroomError, ProofError, ReplayError, UsageError
    from elbowroom.fitting.memory import Meter, memory_report

__version__ = "0.1.0"
__all__ = [
    "ChangedTensorError",
    "ElbowroomError",
    "Meter",
    "Proof",
    "ProofError",
    "ReplayError",
    "Saved",
    "UsageError",
    "checkpoint",
    "memory_report",
    "name",
    "policies",
    "proof",
    "replayable",
    "saved",
    "unwrap",
    "wrap",
]

_HOMES = {
    "core.checkpoint": ("checkpoint", "name", "unwrap", "wrap"),
    "core.functions": ("replayable",),
    "core.inspection": ("Proof", "Saved", "proof", "saved"),
    "errors": ("ChangedTensorError", "ElbowroomError", "ProofError", "ReplayError", "UsageError"),
    "fitting.memory": ("Meter", "memory_report"),
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
