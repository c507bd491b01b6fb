"""The workspace of FlashInfer's plans is large enough for every captured graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dyntree_kernels.cuda.flashinfer_attention import workspace_bytes

HOPPER = 132  # processors
FIXED = 128 << 20  # bytes in FlashInfer's own examples
LLAMA_8B, LLAMA_70B_RANK, WIDE = (32, 8, 128), (8, 1, 128), (16, 4, 256)


def planned(
    heads: int, kv_heads: int, head_size: int, requests: int, rows: int, *, captured: bool = True
) -> int:
    """Return the bytes that FlashInfer 0.7.0 allocates for a plan.

    Sources: step 2 of `PrefillSplitQOKVIndptr`, the tile sizes of `FA2DetermineCtaTileQ`, and the
    two allocations of `PrefillPlanImpl`.
    """
    group = heads // kv_heads
    longest = (rows - requests + 1 if captured else rows // requests) * group
    tile = 16 if longest <= 16 else 64 if longest <= 64 or head_size >= 256 else 128
    programs = 2 * HOPPER // kv_heads
    tiles = -(-rows * group // tile) + requests - 1 if captured else 0
    partials = heads * max(programs, tiles) * tile
    return 4 * partials * head_size + 4 * partials


def graphs(most_rows: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of requests and rows of batches of equally large trees."""
    for nodes in (1, 2, 4, 8, 16, 32, 64):
        for requests in range(1, min(256, most_rows // (1 + nodes)) + 1):
            yield requests, requests * (1 + nodes)


@pytest.mark.parametrize("heads", [LLAMA_8B, LLAMA_70B_RANK, WIDE], ids=str)
@pytest.mark.parametrize("most_rows", [64, 2048])
def test_every_graphs_plan_fits(heads: tuple[int, int, int], most_rows: int) -> None:
    room = workspace_bytes(*heads, HOPPER, min(256, most_rows // 2), most_rows)
    needs = [planned(*heads, *shape) for shape in graphs(most_rows)]
    # More bytes than needed would be missing in the KV cache.
    assert max(needs) <= room <= 1.25 * max(needs)


def test_a_fixed_workspace_would_not_do() -> None:
    for heads in (LLAMA_8B, LLAMA_70B_RANK):
        assert max(planned(*heads, *shape) for shape in graphs(512)) > FIXED


@pytest.mark.parametrize("heads", [LLAMA_8B, LLAMA_70B_RANK, WIDE], ids=str)
def test_plans_without_graphs_fit(heads: tuple[int, int, int]) -> None:
    room = workspace_bytes(*heads, HOPPER)
    assert all(planned(*heads, *shape, captured=False) <= room for shape in graphs(2048))
