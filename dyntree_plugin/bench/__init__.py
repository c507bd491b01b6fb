"""Measurements: acceptance in the laboratory, speed in the engine."""
