"""The counts of the CUDA benchmark, as far as they need no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the benchmark runs Triton kernels")

from benchmarks.kernels.cases import active_tiles, reordered, walk_batch
from dyntree_kernels.ancestors import ancestor_bits
from dyntree_plugin.tree.match import match


def tiles(parents: list[int]) -> int:
    return active_tiles(ancestor_bits(torch.tensor([parents]))[0], len(parents))


def test_heavy_path_order_keeps_the_tree_and_needs_fewer_tiles() -> None:
    picks = torch.rand(768, generator=torch.Generator().manual_seed(0))
    shuffled = [-1, *(int(picks[i] * i) for i in range(1, 768))]
    ordered = reordered(shuffled)
    assert all(parent < node for node, parent in enumerate(ordered))

    def depths(parents: list[int]) -> list[int]:
        depth = [0] * len(parents)
        for node in range(1, len(parents)):
            depth[node] = depth[parents[node]] + 1
        return sorted(depth)

    assert depths(ordered) == depths(shuffled)
    assert tiles(ordered) < tiles(shuffled) / 2


def test_the_walk_that_is_timed_accepts_heavy_paths_to_their_ends() -> None:
    requests, nodes = 5, 64
    batch, trees = walk_batch(requests, nodes, "cpu")
    rows = torch.arange(requests * (nodes + 1)).view(requests, -1)
    assert torch.equal(batch.requests[:, 1], rows[:, 0])
    tokens, depth = batch.ids.long()[rows], int(trees.depths.max())
    found = match(
        tokens[:, 1:], trees.parents, trees.depths, trees.ancestors, tokens[:, 1:] >= 0,
        batch.sampled[rows], depth,
    )  # fmt: skip
    for request in range(requests):
        length = int(found.lengths[request])
        assert found.path[request, :length].tolist() == list(range(length))
        assert trees.depths[request, length - 1] == length >= 4
        assert length - 1 not in trees.parents[request]
