"""The engine: one region, recorded once and replayed in backward. Imports nothing; its verbs are `elbowroom.*`."""
