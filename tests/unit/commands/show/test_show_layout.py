"""The positions of nodes when a tree is drawn."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dyntree_plugin.commands.show.layout import tidy_rows


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    """Draw the children by node, of trees with up to 80 nodes below the root."""
    children: list[list[int]] = [[]]
    for node in range(1, draw(st.integers(0, 80)) + 1):
        children[draw(st.integers(0, node - 1))].append(node)
        children.append([])
    return children


def depths(children: list[list[int]]) -> list[int]:
    found = [0] * len(children)
    for node, below in enumerate(children):
        for child in below:
            found[child] = found[node] + 1
    return found


@settings(deadline=None)
@given(trees())
def test_nodes_of_one_depth_are_a_row_apart_and_no_edges_cross(children: list[list[int]]) -> None:
    rows = tidy_rows(children)
    columns = defaultdict(list)
    # Collect rows by depth, in the order of a walk from top to bottom.
    waiting = [(0, 0)]
    while waiting:
        node, depth = waiting.pop()
        columns[depth].append(rows[node])
        waiting += [(child, depth + 1) for child in reversed(children[node])]
    for column in columns.values():
        assert all(below - above >= 1 for above, below in pairwise(column))
    assert min(rows) == 0


@settings(deadline=None)
@given(trees())
def test_a_parent_stands_in_the_middle_of_its_children(children: list[list[int]]) -> None:
    rows = tidy_rows(children)
    for node, below in enumerate(children):
        if below:
            assert rows[node] == pytest.approx((rows[below[0]] + rows[below[-1]]) / 2)


def test_short_subtrees_stand_beside_long_ones() -> None:
    # Two leaves stand above a path. They need own rows only at the depths that they reach.
    children = [[1, 2], [3, 4], [5], [], [], [6], []]
    assert max(tidy_rows(children)) < 3
