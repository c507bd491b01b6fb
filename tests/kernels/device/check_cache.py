"""Triton's kernels around the tree, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from paged_cases import DEVICE, LAYOUTS, chain, paged_layers, random_tree, star

from dyntree_kernels.ancestors import ancestor_bits as plain_ancestor_bits
from dyntree_kernels.gpu.ancestors import ancestor_bits
from dyntree_kernels.gpu.kv_move import KVMover
from dyntree_kernels.gpu.walk import walk
from dyntree_plugin.tree.verify.match import match

SRC = [[33, 35, 36, 64, 100], [150, 153, -1, -1, -1], [-1, -1, -1, -1, -1]]
DST = [[33, 34, 35, 36, 96], [111, 112, 7, 7, 7], [9, 9, 9, 9, 9]]


def random_bytes(layout: str, layers: int, content: int) -> torch.Tensor:
    caches = paged_layers(layout, layers, 12, 3, 16, content)
    caches.copy_(torch.randint(0, 256, caches.shape, dtype=torch.uint8))
    return caches


def flat(moves: list[list[int]]) -> list[int]:
    return [slot for request in moves for slot in request]


def rows(caches: torch.Tensor) -> torch.Tensor:
    """Copies of the rows [layers, slots, heads, content] in slot order."""
    return caches.transpose(2, 3).flatten(1, 2).clone()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "head_size"), [(torch.bfloat16, 64), (torch.float32, 20)])
def test_rows_move_bit_exactly_and_nothing_else_changes(
    layout: str, dtype: torch.dtype, head_size: int
) -> None:
    caches = random_bytes(layout, 3, 2 * head_size * dtype.itemsize)
    expected = rows(caches)
    for src, dst in zip(flat(SRC), flat(DST), strict=True):
        if src >= 0:
            expected[:, dst] = expected[:, src]
    assert not torch.equal(rows(caches), expected)
    mover = KVMover(list(caches.view(dtype)))
    mover(torch.tensor(SRC, device=DEVICE), torch.tensor(DST, device=DEVICE))
    assert torch.equal(rows(caches), expected)


def test_more_rows_than_are_in_flight_at_once_move_in_order() -> None:
    caches = random_bytes("LBNHC", 2, 64)
    expected = rows(caches)
    src = torch.arange(40)[None] * 3 + 12
    dst = torch.arange(40)[None] + 11
    expected[:, dst[0]] = expected[:, src[0]]
    wide = torch.nn.functional.pad(src, (1, 5)).to(DEVICE)
    KVMover(list(caches))(wide[:, 1:41], dst.to(DEVICE))
    assert torch.equal(rows(caches), expected)


def test_rows_of_odd_bytes_and_layers_of_two_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="32-bit words"):
        KVMover(list(random_bytes("LBNHC", 2, 62)))
    a, b = random_bytes("LBNHC", 2, 64)
    with pytest.raises(ValueError, match="one shape and strides"):
        KVMover([a, b[:, :2]])


@pytest.mark.parametrize("nodes", [1, 31, 33, 130])
def test_ancestor_bits_are_those_of_the_plain_version(nodes: int) -> None:
    g = torch.Generator().manual_seed(nodes)
    tree = torch.tensor(random_tree(nodes, g))
    forest = torch.where(torch.rand(nodes, generator=g) < 0.3, -1, tree)
    parents = torch.stack([torch.tensor(random_tree(nodes, g)), forest, torch.tensor(star(nodes))])
    if nodes < 100:
        parents = torch.cat([parents, torch.tensor([chain(nodes)])])
    assert torch.equal(ancestor_bits(parents.to(DEVICE)).cpu(), plain_ancestor_bits(parents))


def test_parents_may_come_after_their_children() -> None:
    parents = torch.tensor([[2, -1, 1]])
    assert torch.equal(ancestor_bits(parents.to(DEVICE)).cpu(), plain_ancestor_bits(parents))


def trees(requests: int, nodes: int, vocab: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Random trees whose siblings differ, some invalid nodes, draws that at times follow them."""
    g = torch.Generator().manual_seed(seed)
    parents = torch.tensor([random_tree(nodes + 1, g)[1:] for _ in range(requests)]) - 1
    tokens, depths = torch.empty(2, requests, nodes, dtype=torch.int64)
    sampled = torch.randint(vocab, (requests, nodes + 1), generator=g)
    for r in range(requests):
        taken: dict[int, int] = {}
        for i in range(nodes):
            p = int(parents[r, i])
            taken[p] = taken.get(p, -1) + 1
            tokens[r, i] = (taken[p] * 7 + p) % 997
            depths[r, i] = 1 if p < 0 else depths[r, p] + 1
            if torch.rand((), generator=g) < 0.6:
                sampled[r, p + 1] = tokens[r, i]
    valid = torch.rand(requests, nodes, generator=g) < 0.9
    return tokens, parents, depths, valid, sampled


@pytest.mark.parametrize(("requests", "nodes"), [(1, 1), (5, 16), (3, 65)])
def test_the_walk_accepts_what_match_does(requests: int, nodes: int) -> None:
    longest = 0
    for seed in range(4):
        tokens, parents, depths, valid, sampled = trees(requests, nodes, 30, seed)
        levels = int(depths.max()) + 1
        bits = plain_ancestor_bits(torch.nn.functional.pad(parents + 1, (1, 0), value=-1))
        expected = match(tokens, parents, depths, bits, valid, sampled, levels)
        batch = (x.to(DEVICE) for x in (tokens, parents, valid, sampled))
        path, lengths, emitted = (x.cpu() for x in walk(*batch, levels))
        assert torch.equal(path, expected.path)
        assert torch.equal(lengths, expected.lengths)
        meant = torch.arange(levels + 1) <= lengths[:, None]
        assert torch.equal(emitted[meant], expected.tokens[meant])
        assert (emitted[~meant] == -1).all()
        longest = max(longest, int(lengths.max()))
    assert longest >= min(2, nodes)


def test_the_walk_stops_at_an_invalid_node_and_at_the_last_level() -> None:
    tokens, parents = torch.tensor([[5, 6, 7]]), torch.tensor([chain(3)])
    sampled = torch.tensor([[5, 6, 7, 8]])
    for valid, levels, path, emitted in (
        ([True, True, True], 3, [0, 1, 2], [5, 6, 7, 8]),
        ([True, False, True], 3, [0, -1, -1], [5, 6, -1, -1]),
        ([True, True, True], 2, [0, 1], [5, 6, 7]),
    ):
        batch = (tokens, parents, torch.tensor([valid]), sampled)
        got, _, drawn = walk(*(x.to(DEVICE) for x in batch), levels)
        assert got.tolist() == [path]
        assert drawn.tolist() == [emitted]


def test_shapes_that_do_not_fit_are_refused() -> None:
    nodes = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"sampled \(2, 3\) \[R, N \+ 1\]"):
        walk(nodes, nodes, nodes.bool(), nodes, 2)
