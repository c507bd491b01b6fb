"""The model's result as a file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.gpu_model import published
from benchmarks.gpu_model.model import (
    ASSUMED,
    PAIRINGS,
    Assumed,
    Load,
    Pairing,
    Point,
    compared,
)
from benchmarks.gpu_model.tables import BATCHES, CONTEXTS, TEMPERATURES, VARIED

CELLS = [
    (pairing, Load(requests, temperature, context))
    for pairing in PAIRINGS
    for context in CONTEXTS
    for temperature in TEMPERATURES
    for requests in BATCHES
]


def modelled() -> list[dict[str, Any]]:
    """Return every pairing under every load, with every variation of what is assumed."""
    return [
        {"assumed": name, "pairing": pairing.name, **asdict(load), **_told(pairing, load, assumed)}
        for name, assumed in VARIED.items()
        for pairing, load in CELLS
    ]


def _told(pairing: Pairing, load: Load, assumed: Assumed) -> dict[str, Any]:
    found = compared(pairing, load, assumed)
    if found is None:
        return {"fits": False}
    return {
        "fits": True,
        "none": found.none.tokens_per_second,
        "chain": _point(found.chain),
        "block": _point(found.block),
        "tree": _point(found.tree),
    }


def _point(at: Point) -> dict[str, float]:
    return {
        "nodes": at.nodes,
        "forwards": at.step.forwards,
        "seconds": at.seconds,
        "tokens_per_second": at.tokens_per_second,
    }


def result() -> dict[str, Any]:
    """Return all of it but its provenance."""
    return {
        "kind": "model",
        "assumed": asdict(ASSUMED),
        "pairings": [asdict(pairing) for pairing in PAIRINGS],
        "cells": modelled(),
        "published": published.rows(),
    }
