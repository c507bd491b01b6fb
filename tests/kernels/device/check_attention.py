"""Compare Triton's tree attention with the oracles, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from attention_checks import BEYOND, FeatureChecks, assert_matches, on, tree_batch
from attention_inputs import draft_masks, tree_mask
from device_order import ON_GPU, SMALL, OrderOnTheDevice
from paged_cases import DEVICE, LAYOUTS, make_case
from position_checks import PositionChecks
from tree_shapes import chain

from dyntree_kernels.cuda.attention import tiling, tree_attention

FLOAT8 = torch.float8_e4m3fn

BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(not ON_GPU, reason="the interpreter's bfloat16 products are wrong"),
)
# These cases would take the interpreter minutes.
LARGE = pytest.mark.skipif(not ON_GPU, reason="too large for the interpreter")


class TestTreeAttentionOnTheDevice(FeatureChecks):
    kernel = "triton"
    make = staticmethod(make_case)
    ways = ({"splits": 1, "tiles": SMALL}, {"splits": 3, "tiles": SMALL}, {"by_path": True})
    quantised = ({"kv_dtype": FLOAT8},)
    contexts = (0, 1, 15, 16, 17, 95)
    few = not ON_GPU


class TestOrderOfPositionsOnTheDevice(OrderOnTheDevice, PositionChecks):
    make = staticmethod(make_case)
    layouts = (
        {"kv_heads": 1, "group": 7},
        {"dtype": torch.float16, "kv_heads": 1, "group": 1, "head_size": 64},
        {"kv_dtype": FLOAT8},
        *([{"dtype": torch.bfloat16, "head_size": 128, "group": 4}] if ON_GPU else []),
        {},
    )


@pytest.mark.parametrize("splits", [1, 3])
def test_quantised_queries_have_a_scale_for_each_kv_head(splits: int) -> None:
    case = make_case(tree_batch(9, 4), [60, 0], kv_dtype=FLOAT8)
    case.q = case.q.to(FLOAT8)
    own = {"query_scale": torch.tensor([0.9, 1.7]), **BEYOND["all"]}
    case.features = dataclasses.replace(case.features, **on(DEVICE, own))
    out = torch.empty(case.q.shape, dtype=torch.float32, device=DEVICE)
    case.attend(out, splits=splits, tiles=SMALL)
    torch.testing.assert_close(out.double().cpu(), case.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16])
def test_every_physical_layout_is_read(layout: str, dtype: torch.dtype) -> None:
    case = make_case(tree_batch(17, 1, 5), [50, 0, 33], layout=layout, dtype=dtype)
    assert_matches(case)


@pytest.mark.parametrize(
    ("group", "kv_heads", "head_size"),
    [
        (1, 2, 32),
        (5, 1, 32),
        (7, 2, 16),
        (2, 2, 80),
        (2, 1, 512),
    ],
)
def test_ragged_batches_of_every_shape(group: int, kv_heads: int, head_size: int) -> None:
    masks = tree_batch(17, 1, 9)
    case = make_case(masks, [50, 0, 33], group=group, kv_heads=kv_heads, head_size=head_size)
    assert_matches(case)


@pytest.mark.parametrize(("head_size", "value_size"), [(48, 32), (48, 20)])
@pytest.mark.parametrize("splits", [1, 3])
def test_values_may_be_smaller_than_keys(head_size: int, value_size: int, splits: int) -> None:
    """Control: as many elements of a value that begin elsewhere give something else."""
    shape = {"head_size": head_size, "value_size": value_size}
    case = make_case(draft_masks(), [40, 0, 63], **shape)
    own = {name: BEYOND["all"][name] for name in ("window", "sinks")}
    case.features = dataclasses.replace(case.features, **on(DEVICE, own))
    assert_matches(case, splits=splits, tiles=SMALL)
    moved = dataclasses.replace(case, kv_cache=case.kv_cache.roll(1, -1))
    assert not torch.allclose(moved.run().cpu().double(), case.expected(), atol=1e-2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"),
    [
        pytest.param(8, 4, 32, id="embedded"),
        pytest.param(64, 16, 32, id="grown to llama-1b", marks=LARGE),
        pytest.param(32, 8, 64, id="Llama-3.2-1B", marks=LARGE),
        pytest.param(32, 8, 128, id="Llama-3.1-8B", marks=LARGE),
        pytest.param(28, 4, 128, id="Qwen2.5-7B"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16])
def test_served_shapes(heads: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> None:
    """`make gpu-e2e PART=first` begins with these checks."""
    contexts = [1000, 31, 0] if ON_GPU else [40, 31, 0]
    case = make_case(
        tree_batch(17, 1, 6), contexts, group=heads // kv_heads, kv_heads=kv_heads,
        head_size=head_size, dtype=dtype,
    )  # fmt: skip
    assert_matches(case)


@pytest.mark.parametrize("group", [4, 5])
@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16])
def test_a_tree_in_three_tiles(group: int, dtype: torch.dtype) -> None:
    nodes = 33
    tile = tiling(32, nodes * group, dtype.itemsize).block_m
    assert -(-nodes * group // tile) == 3
    assert_matches(
        make_case(tree_batch(nodes, 1, 9), [20, 0, 33], group=group, kv_heads=1, dtype=dtype)
    )


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_splits_share_the_columns_of_a_tile(splits: int) -> None:
    """The first request has 14 tiles, so of 7 splits 4 have some; the second has them in one."""
    assert_matches(make_case(tree_batch(40, 3), [360, 0], kv_heads=1), splits=splits, tiles=SMALL)


@LARGE
@pytest.mark.parametrize(
    ("nodes", "dtype", "head_size"),
    [
        (255, torch.bfloat16, 128),
        (256, torch.float16, 64),
        (257, torch.float32, 128),
        (1024, torch.bfloat16, 128),
        (1024, torch.bfloat16, 256),
        (2048, torch.bfloat16, 64),
        (2048, torch.bfloat16, 128),
    ],
)
def test_large_trees_behind_long_contexts(nodes: int, dtype: torch.dtype, head_size: int) -> None:
    case = make_case(
        tree_batch(nodes, 64, 1), [4095, 16, 1000], group=4, kv_heads=8, head_size=head_size,
        dtype=dtype,
    )  # fmt: skip
    expected = case.expected()
    assert_matches(case, expected)
    assert_matches(case, expected, splits=1)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_equal_scores_give_the_mean_of_the_visible_values(dtype: torch.dtype) -> None:
    case = make_case(tree_batch(40, 9), [70, 0], kv_heads=1, dtype=dtype)
    case.q.zero_()
    assert_matches(case)


def test_the_cpu_kernel_gives_the_same() -> None:
    sys.path.append(str(Path(__file__).parents[1]))
    from packed_cases import empty_cache, write

    from dyntree_kernels.cpu.attention import tree_attention as on_cpu

    case = make_case(draft_masks(), [40, 0, 63], block_size=32)
    packed = empty_cache(case.kv_cache.shape[0], 2, 32, 32, torch.float32)
    for r, (mask, keys, values) in enumerate(zip(case.masks, case.keys, case.values, strict=True)):
        seen = torch.nn.functional.pad(mask.any(0), (int(case.ctx_lens[r]), 0), value=True)
        at = seen.nonzero().flatten()
        slots = case.block_table[r].cpu()[at // 32].long() * 32 + at % 32
        write(*packed, "vec", slots, keys[seen], values[seen])
    out = torch.empty(case.q.shape)
    _, _, *rest = (x.cpu() for x in case.arguments)
    on_cpu(case.q.cpu(), *packed, "vec", *rest, out, case.features)
    torch.testing.assert_close(case.run().cpu(), out, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
def test_a_captured_graph_follows_new_trees_and_lengths() -> None:
    first, second = (make_case(tree_batch(30, 20), [ctx, 40], seed=ctx) for ctx in (100, 64))
    out = torch.empty_like(first.q)
    wide = max(first.block_table.shape[1], second.block_table.shape[1])
    for case in (first, second):
        case.block_table = torch.nn.functional.pad(
            case.block_table, (0, wide - case.block_table.shape[1])
        )
    blocks = max(first.kv_cache.shape[0], second.kv_cache.shape[0])
    cache = torch.full((blocks, *first.kv_cache.shape[1:]), torch.nan, device=DEVICE)
    live = [x.clone() for x in first.arguments]
    live[1] = cache

    def launch() -> None:
        tree_attention(*live, out, first.features, max_rows=30)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for case in (first, second):
        for mine, theirs in zip(live, case.arguments, strict=True):
            if mine is not cache:
                mine.copy_(theirs)
        cache[: case.kv_cache.shape[0]] = case.kv_cache
        graph.replay()
        torch.testing.assert_close(out.double().cpu(), case.expected(), atol=1e-5, rtol=1e-5)


def test_mistaken_arguments_are_named() -> None:
    case = make_case([tree_mask(chain(3))], [5])
    with pytest.raises(ValueError, match=r"kv_cache .* must be \[blocks, Hkv, N, 64\]"):
        dataclasses.replace(case, kv_cache=case.kv_cache[..., :32]).run()
    with pytest.raises(ValueError, match="must be int32"):
        dataclasses.replace(case, bits=case.bits.long()).run()
    with pytest.raises(ValueError, match="tree columns, at most"):
        dataclasses.replace(case, bits=case.bits.repeat(1, 200)).run()


def test_bits_may_be_wider_than_the_tree_and_their_rows_padded() -> None:
    case = make_case(tree_batch(20), [30])
    wide = torch.zeros(30, 3, dtype=torch.int32, device=DEVICE)
    wide[:20, :1] = case.bits
    assert torch.equal(dataclasses.replace(case, bits=wide[:, :2]).run(), case.run())
