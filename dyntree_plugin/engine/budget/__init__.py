"""The adaptive node budget in the engine."""
