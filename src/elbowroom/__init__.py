"""Elbowroom: train PyTorch models in the memory you have."""

from elbowroom.core import Proof, Saved, checkpoint, name, policies, proof, replayable, saved, unwrap, wrap
from elbowroom.errors import ChangedTensorError, ElbowroomError, ProofError, ReplayError, UsageError

__all__ = [
    "ChangedTensorError",
    "ElbowroomError",
    "Proof",
    "ProofError",
    "ReplayError",
    "Saved",
    "UsageError",
    "checkpoint",
    "name",
    "policies",
    "proof",
    "replayable",
    "saved",
    "unwrap",
    "wrap",
]
__version__ = "0.1.0"
