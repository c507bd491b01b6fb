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


@pytest.mark.parametrize(("rows", "size"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64)])
def test_few_rows_are_in_the_smallest_tile_that_holds_them(rows: int, size: int) -> None:
    assert tiling(128, rows, HALF).block_m == size


@pytest.mark.parametrize(("head_size", "size"), [(256, HALF), (128, SINGLE)])
def test_wide_rows_are_in_tiles_that_fit_into_registers(head_size: int, size: int) -> None:
    assert {tiling(head_size, rows, size).block_m for rows in (1, 32, 33, 68, 500)} == {32, 64}
    assert {tiling(512, rows, size).block_m for rows in (1, 33, 500)} == {32}
