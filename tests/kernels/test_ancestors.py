"""Ancestor bitmasks against their definition."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dyntree_kernels.ancestors import ancestor_bits, pack_bits, unpack_bits


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Draw a batch of parent lists of equal length: trees, with roots at any index."""
    nodes = draw(st.integers(1, 70))
    parent = [st.integers(-1, i - 1) for i in range(nodes)]
    return draw(st.lists(st.tuples(*parent).map(list), min_size=1, max_size=3))


@settings(deadline=None)
@given(forests())
def test_bits_are_the_transitive_closure_of_the_parents(batch: list[list[int]]) -> None:
    bits = unpack_bits(ancestor_bits(torch.tensor(batch)), len(batch[0]))
    for row, parents in enumerate(batch):
        for node in range(len(parents)):
            path, up = set(), node
            while up >= 0:
                path.add(up)
                up = parents[up]
            assert set(bits[row, node].nonzero().flatten().tolist()) == path


def test_a_chain_longer_than_a_word_reaches_its_root() -> None:
    bits = ancestor_bits(torch.arange(-1, 129)[None])
    assert torch.equal(unpack_bits(bits[0], 130), torch.ones(130, 130).tril().bool())


def test_parents_may_come_after_their_children() -> None:
    bits = unpack_bits(ancestor_bits(torch.tensor([[2, -1, 1]])), 3)
    expected = [[True, True, True], [False, True, False], [False, True, True]]
    assert bits[0].tolist() == expected


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(0, 2**32))
def test_packing_round_trips(columns: int, seed: int) -> None:
    mask = torch.rand(3, columns, generator=torch.Generator().manual_seed(seed)) < 0.5
    bits = pack_bits(mask)
    assert bits.dtype == torch.int32
    assert bits.shape == (3, -(-columns // 32))
    assert torch.equal(unpack_bits(bits, columns), mask)
