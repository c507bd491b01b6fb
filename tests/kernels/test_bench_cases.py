"""The cases of the CUDA benchmark, as far as they need no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the benchmark runs Triton kernels")

from benchmarks.kernels.cases import walk_batch
from dyntree_plugin.tree.match import match


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
