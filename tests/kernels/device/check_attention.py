"""Compare Triton's tree attention with the oracles, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path

import pytest
import torch
from attention_inputs import draft_masks, tree_mask
from paged_cases import DEVICE, LAYOUTS, Case, make_case
from tree_shapes import chain, random_tree, star

from benchmarks.kernels.two_pass import two_pass_attention
from dyntree_kernels.cuda.attention import Tiling, tiling, tree_attention
from dyntree_kernels.features import LayerFeatures
from dyntree_kernels.reference import path_attention

ON_GPU = DEVICE.type == "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SMALL = Tiling(16, 32, 4, 2)

BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(not ON_GPU, reason="the interpreter's bfloat16 products are wrong"),
)
# These cases would take the interpreter minutes.
LARGE = pytest.mark.skipif(not ON_GPU, reason="too large for the interpreter")


def run(case: Case, **options: object) -> torch.Tensor:
    out = torch.full_like(case.q, torch.nan)
    rows = max(mask.shape[0] for mask in case.masks)
    tree_attention(*case.arguments, out, case.features, max_rows=rows, **options)
    return out


def assert_matches(case: Case, expected: torch.Tensor | None = None, **options: object) -> None:
    """Compare with the oracle; ``expected`` is its result if the caller has it already."""
    tolerance = TOLERANCE[case.q.dtype]
    wanted = case.expected() if expected is None else expected
    torch.testing.assert_close(
        run(case, **options).double().cpu(), wanted, atol=tolerance, rtol=2 * tolerance,
        equal_nan=True,
    )  # fmt: skip


def tree_batch(*nodes: int) -> list[torch.Tensor]:
    return [tree_mask(random_tree(n, torch.Generator().manual_seed(n))) for n in nodes]


@pytest.mark.parametrize("nodes", [1, 2, 31, 32, 33, 65])
@pytest.mark.parametrize("build", ["random", "chain", "star"])
def test_every_node_sees_the_context_and_its_root_path(nodes: int, build: str) -> None:
    g = torch.Generator().manual_seed(nodes)
    tree = {"random": lambda n: random_tree(n, g), "chain": chain, "star": star}[build](nodes)
    contexts = [0, 1, 15, 16, 17, 95]
    contexts = contexts if ON_GPU else contexts[nodes % 3 :: 3]
    masks = [tree_mask(tree)] * len(contexts)
    case = make_case(masks, contexts, kv_heads=1, head_size=16, seed=nodes)
    out = run(case).cpu()
    torch.testing.assert_close(out.double(), case.expected(), atol=1e-5, rtol=1e-5)
    for r in range(len(contexts)):
        rows = case.rows(r)
        replay = path_attention(
            case.q[rows].cpu(), case.keys[r], case.values[r], tree, case.features
        )
        torch.testing.assert_close(out[rows].double(), replay, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16])
def test_every_physical_layout_is_read(layout: str, dtype: torch.dtype) -> None:
    case = make_case(tree_batch(17, 1, 5), [50, 0, 33], layout=layout, dtype=dtype)
    assert_matches(case)


@pytest.mark.parametrize(
    ("group", "kv_heads", "head_size"),
    [(1, 2, 32), (4, 2, 64), (5, 1, 32), (7, 2, 16), (8, 1, 128), (2, 2, 80), (1, 1, 256)],
)
def test_ragged_batches_of_every_shape(group: int, kv_heads: int, head_size: int) -> None:
    masks = tree_batch(17, 1, 9)
    case = make_case(masks, [50, 0, 33], group=group, kv_heads=kv_heads, head_size=head_size)
    assert_matches(case)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"),
    [
        pytest.param(8, 4, 32, id="embedded"),
        pytest.param(64, 16, 32, id="grown to llama-1b"),
        pytest.param(32, 8, 64, id="Llama-3.2-1B"),
        pytest.param(32, 8, 128, id="Llama-3.1-8B"),
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
    assert_matches(make_case(tree_batch(40, 3), [100, 0], kv_heads=1), splits=splits, tiles=SMALL)


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


@pytest.mark.parametrize("splits", [1, 3])
def test_draft_rows_ignore_the_columns_nobody_sees(splits: int) -> None:
    case = make_case(draft_masks(), [40, 0, 63])
    assert case.kv_cache.isnan().any()
    assert_matches(case, splits=splits)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    ("part", "broken"), [(0, torch.nan), (1, torch.nan), (1, torch.inf), (1, -torch.inf)]
)
def test_what_is_not_finite_reaches_the_rows_that_see_it_alone(
    part: int, broken: float, splits: int
) -> None:
    contexts, nodes = [50, 0], (40, 9)
    case = make_case(tree_batch(*nodes), contexts, kv_heads=1)
    whole = run(case, splits=splits, tiles=SMALL)
    places = [(0, 50), (0, 67), (0, 89), (1, 0), (1, 4), (0, 13)]
    # A run takes the interpreter half a second; together the parameters have every place.
    for request, position in places if ON_GPU else places[splits // 3 :: 2]:
        cache, node = case.kv_cache.clone(), position - contexts[request]
        block = case.block_table[request, position // 16]
        cache[block, :, position % 16, 32 * part + 3] = broken
        out = run(dataclasses.replace(case, kv_cache=cache), splits=splits, tiles=SMALL)
        sees = torch.zeros(len(whole), dtype=torch.bool, device=DEVICE)
        of_request = case.masks[request]
        sees[case.rows(request)] = of_request[:, node].to(DEVICE) if node >= 0 else True
        assert torch.equal(out[~sees], whole[~sees])
        assert not out[sees].isfinite().flatten(1).all(1).any()


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_that_see_nothing_get_zeros(splits: int) -> None:
    case = make_case([tree_mask(chain(5)), tree_mask(star(9))], [0, 40])
    whole, bits = run(case, splits=splits), case.bits.clone()
    bits[:5] = 0
    out = run(dataclasses.replace(case, bits=bits), splits=splits)
    assert (out[:5] == 0).all()
    assert torch.equal(out[5:], whole[5:])


def test_columns_beyond_the_block_table_are_not_looked_up() -> None:
    case = make_case(draft_masks(), [40, 0, 63])
    wide = torch.nn.functional.pad(case.bits, (0, 5))
    assert torch.equal(run(dataclasses.replace(case, bits=wide)), run(case))


@pytest.mark.parametrize("splits", [1, 3])
def test_positions_beyond_the_block_table_are_in_the_null_block(splits: int) -> None:
    masks = [tree_mask(chain(40)), tree_mask(chain(9)), tree_mask(chain(9))]
    case = make_case(masks, [40, 70, 0], poison=0.0)
    narrow = case.block_table[:, :4].contiguous()
    found, padded = (
        run(dataclasses.replace(case, block_table=table), splits=splits, tiles=SMALL)
        for table in (narrow, torch.nn.functional.pad(narrow, (0, 1)))
    )
    assert torch.equal(found, padded)
    assert not torch.equal(found, run(case, splits=splits, tiles=SMALL))


def test_requests_without_a_tree_are_left_untouched() -> None:
    for splits in (1, 2):
        case = make_case([tree_mask(chain(n)) for n in (6, 3, 9)], [20, 30, 0])
        full = run(case, splits=splits)
        case.ctx_lens[1] = -1
        out = torch.full_like(case.q, 7.0)
        tree_attention(*case.arguments, out, case.features, splits=splits, max_rows=9)
        assert (out[6:9] == 7.0).all()
        assert torch.equal(out[:6], full[:6])
        assert torch.equal(out[9:], full[9:])


def test_one_wrong_ancestor_bit_is_noticed() -> None:
    nodes = 12
    case = make_case(tree_batch(nodes), [20], kv_heads=1, head_size=16, poison=0.0)
    expected = case.expected()
    for row in range(nodes):
        bits = case.bits.clone()
        bits[row, 0] ^= 1 << (row * 7 % nodes)
        if not bits[row].any():
            continue
        wrong = run(dataclasses.replace(case, bits=bits)).double().cpu()
        differs = ~torch.isclose(wrong, expected, atol=1e-5, rtol=1e-5).all(-1).all(-1)
        assert differs.nonzero().flatten().tolist() == [row]


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_equal_scores_give_the_mean_of_the_visible_values(dtype: torch.dtype) -> None:
    case = make_case(tree_batch(40, 9), [70, 0], kv_heads=1, dtype=dtype)
    case.q.zero_()
    assert_matches(case)


@pytest.mark.parametrize("splits", [1, 3])
def test_lse_is_the_natural_logarithm_of_the_denominators(splits: int) -> None:
    case = make_case(tree_batch(20, 3), [45, 0])
    lse = torch.empty(case.q.shape[:2], device=DEVICE)
    run(case, lse=lse, splits=splits)
    torch.testing.assert_close(lse.double().cpu(), case.expected_lse(), atol=1e-5, rtol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    case = make_case([tree_mask(star(12))], [70])
    case.q *= 3000.0
    torch.testing.assert_close(
        run(case).double().cpu(), case.expected(), atol=1e-3, rtol=1e-3, equal_nan=True
    )


def context_oracle(case: Case, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Compute attention over the context alone. An empty context is left out: kernels differ
    there."""
    for r, mask in enumerate(case.masks):
        rows = case.rows(r)
        bare = dataclasses.replace(
            case, q=case.q[rows], ctx_lens=case.ctx_lens[r : r + 1], masks=[mask & False],
            qo_indptr=torch.tensor([0, mask.shape[0]]), keys=[case.keys[r]],
            values=[case.values[r]],
        )  # fmt: skip
        empty = case.ctx_lens[r] == 0
        out[rows] = torch.nan if empty else bare.expected().to(out)
        lse[rows] = torch.inf if empty else bare.expected_lse().to(lse)


def test_two_passes_give_what_one_does_also_behind_an_empty_context() -> None:
    for masks, contexts in ((tree_batch(20, 5, 1), [50, 0, 33]), (draft_masks(), [40, 0, 63])):
        case = make_case(masks, contexts)
        out = torch.full_like(case.q, torch.nan)
        two_pass_attention(
            *case.arguments, out, case.features, functools.partial(context_oracle, case)
        )
        torch.testing.assert_close(out.double().cpu(), case.expected(), atol=1e-5, rtol=1e-5)


def test_the_cpu_kernel_gives_the_same() -> None:
    sys.path.append(str(Path(__file__).parents[1]))
    from tree_cases import empty_cache, write

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
    torch.testing.assert_close(run(case).cpu(), out, atol=1e-5, rtol=1e-5)


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
        run(dataclasses.replace(case, kv_cache=case.kv_cache[..., :32]))
    with pytest.raises(ValueError, match="must be int32"):
        run(dataclasses.replace(case, bits=case.bits.long()))
    with pytest.raises(ValueError, match="tree columns, at most"):
        run(dataclasses.replace(case, bits=case.bits.repeat(1, 200)))
    with pytest.raises(ValueError, match="needs the lse of the context"):
        run(case, seeded=True)


def test_bits_may_be_wider_than_the_tree_and_their_rows_padded() -> None:
    case = make_case(tree_batch(20), [30])
    wide = torch.zeros(30, 3, dtype=torch.int32, device=DEVICE)
    wide[:20, :1] = case.bits
    assert torch.equal(run(dataclasses.replace(case, bits=wide[:, :2])), run(case))


def test_features_that_the_kernel_does_not_serve_are_refused() -> None:
    case = make_case([tree_mask(chain(3))], [5])
    case.features = LayerFeatures(1.0, sinks=torch.zeros(4))
    with pytest.raises(ValueError, match="'triton' does not serve sinks"):
        run(case)
