"""Tiles of tree attention are the fastest of those that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="these kernels are written in Triton")

from dyntree_kernels.cuda.attention import tiling

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GROUP = 4  # query heads per KV head in the measurement
HALF, SINGLE = 2, 4
"""Bytes of an element."""


def test_tiles_are_the_fastest_measured() -> None:
    measured: dict[tuple[int, int], dict[int, float]] = {}
    for entry in json.loads((RESULTS / "kernels-h200.json").read_text())["tilings"]:
        tile = int(entry["implementation"].split()[1])
        shape = entry["rows"], entry["context"]
        measured.setdefault(shape, {})[tile] = entry["microseconds"]
    assert len(measured) == 6
    for (rows, _), times in measured.items():
        assert tiling(128, rows * GROUP, HALF).block_m == min(times, key=lambda x: times[x])
