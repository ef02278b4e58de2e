"""The engine: one region, recorded once and replayed in backward."""

from elbowroom.core import policies
from elbowroom.core.checkpoint import checkpoint, name, unwrap, wrap
from elbowroom.core.functions import replayable
from elbowroom.core.inspection import Proof, Saved, proof, saved

__all__ = ["Proof", "Saved", "checkpoint", "name", "policies", "proof", "replayable", "saved", "unwrap", "wrap"]
