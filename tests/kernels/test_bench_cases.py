"""The cases of the CUDA benchmark, as far as they need no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the benchmark runs Triton kernels")

from reference.match import match

from benchmarks.kernels import on_cuda
from benchmarks.kernels.cases import walk_batch


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


def test_what_a_library_asserts_leaves_its_kernel_out_and_the_others_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(batch: object) -> object:
        raise AssertionError("output must match")

    monkeypatch.setattr(on_cuda.timing, "ceilings", lambda dtype: {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(on_cuda.cases, "make_batch", lambda *shape: shape)
    benchmark = on_cuda.Benchmark(60, "flash_attn_interface")
    monkeypatch.setattr(benchmark, "runners", lambda: {"xqa": broken, "triton": lambda batch: 7.0})
    monkeypatch.setattr(benchmark, "_times", lambda batch, times: {"microseconds": times})
    assert [*benchmark.measure_all()]
    shapes = len(on_cuda.CONTEXTS) * (len(on_cuda.ROWS) + 1)
    assert [each["microseconds"] for each in benchmark.attention] == [7.0] * shapes
    assert [each["requests"] for each in benchmark.batches] == [of[2] for of in on_cuda.BATCHES]
    assert len(benchmark.left_out) == shapes + len(on_cuda.BATCHES)
    assert "AssertionError: output must match" in str(benchmark.left_out)
