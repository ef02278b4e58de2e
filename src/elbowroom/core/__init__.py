"""The engine: one region, recorded once and replayed in backward."""

from elbowroom.core.checkpoint import checkpoint, name, unwrap, wrap

__all__ = ["checkpoint", "name", "unwrap", "wrap"]
