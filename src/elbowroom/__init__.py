"""Elbowroom: train PyTorch models in the memory you have."""

from elbowroom.core import checkpoint, name, unwrap, wrap

__all__ = ["checkpoint", "name", "unwrap", "wrap"]
__version__ = "0.1.0"
