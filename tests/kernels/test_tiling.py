"""Tiles of tree attention: what they multiply in vain, and how often they read the context."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="these kernels are written in Triton")

from dyntree_kernels.cuda.attention import TILE_ROWS, tiling

HALF, SINGLE = 2, 4
"""Bytes of an element."""


def tiles(rows: int) -> tuple[int, int]:
    """Return the number of tiles of so many packed rows, and the rows of each."""
    each = tiling(128, rows, HALF).block_m
    return -(-rows // each), each


@pytest.mark.parametrize("nodes", [16, 32, 64])
@pytest.mark.parametrize("group", range(1, 9))
def test_a_tree_with_its_root_leaves_little_of_its_tiles_empty(nodes: int, group: int) -> None:
    rows = (nodes + 1) * group
    number, each = tiles(rows)
    empty = 1 - rows / (number * each)
    assert empty < (1 / 2 if number == 1 else 1 / 3)


def test_rows_that_fit_into_one_tile_are_in_the_smallest() -> None:
    for rows in range(1, max(TILE_ROWS) + 1):
        smallest = min(each for each in TILE_ROWS if each >= rows)
        assert tiles(rows) == (1, smallest)


def test_the_context_is_read_once_more_than_needed_at_most() -> None:
    for rows in range(1, 4097):
        assert tiles(rows)[0] <= -(-rows // max(TILE_ROWS)) + 1


@pytest.mark.parametrize(("head_size", "size"), [(256, HALF), (128, SINGLE)])
def test_wide_rows_are_in_tiles_that_fit_into_registers(head_size: int, size: int) -> None:
    assert {tiling(head_size, rows, size).block_m for rows in (1, 32, 33, 68, 500)} == {32, 64}
