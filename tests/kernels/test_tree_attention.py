"""Tree attention on the CPU against a dense oracle and a replay of every path from the root."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_inputs import draft_masks, tree_mask
from tree_cases import Case, make_case, write
from tree_shapes import chain, random_tree, star

from dyntree_kernels.cpu.attention import PackedCache, TreeAttention, _tree_attention
from dyntree_kernels.cpu.kv_move import _move, kv_move
from dyntree_kernels.cpu.warm_up import warm_up
from dyntree_kernels.features import LayerFeatures
from dyntree_kernels.reference import path_attention

CONTEXTS = [0, 1, 31, 32, 33, 95, 200]
REPLAYED = [0, 4, 5]  # contexts that are also compared path by path
BROKEN = [("keys", torch.nan), ("values", torch.nan), ("values", torch.inf), ("values", -torch.inf)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def assert_matches(case: Case) -> None:
    tolerance = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(
        case.run().double(), case.expected(), atol=tolerance, rtol=2 * tolerance, equal_nan=True
    )


@pytest.mark.parametrize("nodes", [1, 2, 31, 32, 33, 63, 64, 65])
@pytest.mark.parametrize("shape", ["random", "chain", "star"])
def test_every_node_sees_the_context_and_its_root_path(nodes: int, shape: str) -> None:
    g = torch.Generator().manual_seed(nodes)
    build = {"random": lambda n: random_tree(n, g), "chain": chain, "star": star}[shape]
    trees = [build(nodes) for _ in CONTEXTS]
    case = make_case([tree_mask(tree) for tree in trees], CONTEXTS, seed=nodes)
    out = case.run()
    torch.testing.assert_close(out.double(), case.expected(), atol=1e-5, rtol=1e-5)
    for r in REPLAYED:
        rows = slice(*case.qo_indptr[r : r + 2].tolist())
        replay = path_attention(case.q[rows], case.keys[r], case.values[r], trees[r], case.features)
        torch.testing.assert_close(out[rows].double(), replay, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize(
    ("isa", "dtype", "head_size"),
    [
        ("vec", torch.float32, 32),
        ("vec", torch.float32, 64),
        ("vec", torch.float32, 128),
        ("vec16", torch.float32, 80),
        ("vec", torch.float16, 64),
        ("vec", torch.bfloat16, 128),
        ("vec16", torch.bfloat16, 112),
        ("amx", torch.bfloat16, 32),
        ("amx", torch.bfloat16, 64),
        ("amx", torch.bfloat16, 128),
    ],
)
@pytest.mark.parametrize("block_size", [32, 128])
def test_ragged_batches_in_every_layout(
    isa: str, dtype: torch.dtype, head_size: int, group: int, block_size: int
) -> None:
    g = torch.Generator().manual_seed(group)
    masks = [tree_mask(random_tree(nodes, g)) for nodes in (17, 1, 40, 5)]
    case = make_case(
        masks, [50, 0, 33, 300], group=group, head_size=head_size, block_size=block_size,
        dtype=dtype, isa=isa,
    )  # fmt: skip
    assert_matches(case)


@pytest.mark.parametrize(("isa", "dtype"), [("vec", torch.float32), ("amx", torch.bfloat16)])
def test_draft_rows_ignore_the_columns_nobody_sees(isa: str, dtype: torch.dtype) -> None:
    case = make_case(draft_masks(), [40, 0, 63], isa=isa, dtype=dtype)
    assert case.key_cache.isnan().any()
    assert_matches(case)


def with_broken(case: Case, request: int, position: int, part: str, broken: float) -> torch.Tensor:
    """Return the output with one position's keys or values ``broken``, in one element of each
    head."""
    kept = {"keys": case.keys[request], "values": case.values[request]}
    row = {name: rows[position : position + 1].clone() for name, rows in kept.items()}
    row[part][..., 3] = broken
    slots = case.slots(torch.tensor([position]), request)
    caches = case.key_cache.clone(), case.value_cache.clone()
    write(*caches, case.isa, slots, row["keys"], row["values"])
    return dataclasses.replace(case, key_cache=caches[0], value_cache=caches[1]).run()


@pytest.mark.parametrize(("part", "broken"), BROKEN)
@pytest.mark.parametrize(("isa", "dtype"), [("vec", torch.float32), ("amx", torch.bfloat16)])
def test_what_is_not_finite_reaches_the_rows_that_see_it_alone(
    isa: str, dtype: torch.dtype, part: str, broken: float
) -> None:
    trees = [random_tree(nodes, torch.Generator().manual_seed(nodes)) for nodes in (40, 9)]
    contexts = [50, 0]
    case = make_case([tree_mask(tree) for tree in trees], contexts, isa=isa, dtype=dtype)
    whole = case.run()
    for request, node in ((0, 0), (0, 17), (0, 39), (1, 0), (1, 4)):
        ctx, first = contexts[request], int(case.qo_indptr[request])
        out = with_broken(case, request, ctx + node, part, broken)
        sees = torch.zeros(len(whole), dtype=torch.bool)
        sees[first : first + len(trees[request])] = tree_mask(trees[request])[:, node]
        assert torch.equal(out[~sees], whole[~sees])
        assert not out[sees].isfinite().flatten(1).all(1).any()
    of_context = with_broken(case, 0, 13, part, broken)
    assert not of_context[:40].isfinite().flatten(1).all(1).any()
    assert torch.equal(of_context[40:], whole[40:])


def test_rows_that_see_nothing_get_zeros() -> None:
    case = make_case([tree_mask(chain(5)), tree_mask(star(9)), tree_mask(chain(3))], [0, 40, 0])
    whole, bits = case.run(), case.bits.clone()
    bits[:5] = 0
    bits[15] = 0
    out = dataclasses.replace(case, bits=bits).run()
    assert (out[:5] == 0).all()
    assert (out[15] == 0).all()
    assert torch.equal(out[5:14], whole[5:14])


def test_columns_beyond_the_block_table_are_not_looked_up() -> None:
    case = make_case(draft_masks(), [40, 0, 63])
    wide = torch.nn.functional.pad(case.bits, (0, 5))
    assert torch.equal(dataclasses.replace(case, bits=wide).run(), case.run())


def test_positions_beyond_the_block_table_are_in_the_null_block() -> None:
    masks = [tree_mask(chain(40)), tree_mask(chain(9)), tree_mask(chain(9))]
    case = make_case(masks, [40, 70, 0])
    for cache in (case.key_cache, case.value_cache):
        cache.nan_to_num_()
    narrow = case.block_table[:, :2].contiguous()
    found, padded = (
        dataclasses.replace(case, block_table=table).run()
        for table in (narrow, torch.nn.functional.pad(narrow, (0, 1)))
    )
    assert torch.equal(found, padded)
    assert not torch.equal(found, case.run())


def test_equal_scores_give_the_mean_of_the_visible_values() -> None:
    masks = [tree_mask(random_tree(n, torch.Generator().manual_seed(n))) for n in (40, 9)]
    ctx_lens = [70, 0]
    case = make_case(masks, ctx_lens)
    case.q.zero_()
    case.value_cache.copy_(torch.randint(0, 2, case.value_cache.shape).float())
    out, expected = case.run(), []
    for r, mask in enumerate(masks):
        position = torch.arange(ctx_lens[r] + mask.shape[1])
        v = case.value_cache[case.block_table[r, position // 32], :, position % 32]
        visible = torch.nn.functional.pad(mask, (ctx_lens[r], 0), value=True).float()
        mean = torch.einsum("nl,lhd->nhd", visible, v) / visible.sum(1)[:, None, None]
        expected.append(mean.repeat_interleave(2, 1))
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-6, rtol=0)


def test_one_wrong_ancestor_bit_is_noticed() -> None:
    nodes = 33
    case = make_case([tree_mask(random_tree(nodes, torch.Generator().manual_seed(1)))], [50])
    expected = case.expected()
    for row in range(nodes):
        column = (row * 7) % nodes
        bits = case.bits.clone()
        bits[row, column // 32] ^= 1 << (column % 32)
        if not bits[row].any():
            continue
        wrong = dataclasses.replace(case, bits=bits).run().double()
        differs = ~torch.isclose(wrong, expected, atol=1e-5, rtol=1e-5).all(-1).all(-1)
        assert differs.nonzero().flatten().tolist() == [row]


def test_requests_without_a_tree_are_left_untouched() -> None:
    masks = [tree_mask(chain(n)) for n in (6, 3, 9)]
    case = make_case(masks, [20, 30, 0])
    case.ctx_lens[1] = -1
    out = torch.full_like(case.q, 7.0)
    case.attend(out)
    assert (out[6:9] == 7.0).all()
    case.ctx_lens[1] = 30
    full = case.run()
    assert torch.equal(out[:6], full[:6])
    assert torch.equal(out[9:], full[9:])


def test_rows_of_a_wider_projection_are_read_and_written_in_place() -> None:
    case = make_case([tree_mask(random_tree(20, torch.Generator().manual_seed(2)))], [45])
    tokens, heads, d = case.q.shape
    wide_q, wide_out = torch.full((2, tokens, (heads + 3) * d), 5.0)
    inner = slice(d, d + heads * d)
    wide_q[:, inner] = case.q.flatten(1)
    view = dataclasses.replace(case, q=wide_q[:, inner].view(tokens, heads, d))
    view.attend(wide_out[:, inner].view(tokens, heads, d))
    assert torch.equal(wide_out[:, inner], case.run().flatten(1))
    assert (wide_out[:, :d] == 5.0).all()
    assert (wide_out[:, d + heads * d :] == 5.0).all()


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    masks = [tree_mask(random_tree(n, torch.Generator().manual_seed(n))) for n in (64, 30)]
    case = make_case(masks, [500, 900], kv_heads=3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = case.run()
        torch.set_num_threads(2)
        assert torch.equal(case.run(), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("large", [60.0, 3000.0])
def test_large_scores_do_not_overflow(large: float) -> None:
    case = make_case([tree_mask(star(12))], [70])
    case.q *= large
    torch.testing.assert_close(case.run().double(), case.expected(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chain_agrees_with_the_stock_causal_kernel(dtype: torch.dtype) -> None:
    ops = pytest.importorskip("vllm._custom_ops", reason="needs vLLM's attention operator")
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        pytest.skip("this vLLM was not built for the CPU")
    case = make_case([tree_mask(chain(n)) for n in (17, 40)], [100, 33], head_size=64, dtype=dtype)
    for cache in (case.key_cache, case.value_cache):
        cache.nan_to_num_(0.0)  # vLLM's kernel multiplies whole blocks
    seq_lens = (case.ctx_lens + torch.tensor([17, 40])).int()
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=2, num_heads=4, num_kv_heads=2, head_dim=64, seq_lens=seq_lens, dtype=dtype,
        query_start_loc=case.qo_indptr, causal=True, sliding_window_size=-1, isa="vec",
        enable_kv_split=False,
    )  # fmt: skip
    stock = torch.empty_like(case.q)
    ops.cpu_attention_with_kv_cache(
        case.q, case.key_cache, case.value_cache, stock, case.qo_indptr, seq_lens,
        case.features.scale,
        True, None, -1, case.block_table, 0.0, metadata, None,
    )  # fmt: skip
    expected, out = case.expected(), case.run().double()
    error, stock_error = (out - expected).abs().max(), (stock.double() - expected).abs().max()
    assert error <= 2 * stock_error


def test_a_step_after_warm_up_compiles_nothing() -> None:
    warm_up(torch.float32)
    compiled = len(_tree_attention.signatures), len(_move.signatures)
    case = make_case([tree_mask(star(4))], [9])
    case.block_table = torch.nn.functional.pad(case.block_table, (0, 3))[:, :2]
    case.ctx_lens = case.ctx_lens.int()
    case.run()
    kv_move([case.key_cache], [case.value_cache], "vec", *torch.ones(2, 1, 5, dtype=torch.int32))
    assert (len(_tree_attention.signatures), len(_move.signatures)) == compiled


def test_masks_and_lengths_may_be_written_after_the_layers_share_them() -> None:
    case = make_case([tree_mask(random_tree(9, torch.Generator().manual_seed(3)))], [70])
    cache = PackedCache(case.key_cache, case.value_cache, case.isa)

    def outputs(bits: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs of two layers; mask and length are written after the forward began."""
        attend = TreeAttention(case.block_table, lengths, case.qo_indptr.int(), bits)
        case_bits.copy_(case.bits)
        case_lengths.copy_(case.ctx_lens)
        first, second = torch.empty_like(case.q), torch.empty_like(case.q)
        attend(case.q, cache, first, case.features)
        attend(case.q, cache, second, case.features)
        return first, second

    case_bits, case_lengths = torch.ones_like(case.bits), torch.zeros(1, dtype=torch.int32)
    for out in outputs(case_bits, case_lengths):
        torch.testing.assert_close(out.double(), case.expected(), atol=1e-5, rtol=1e-5)
    case_bits.fill_(1)
    case_lengths.zero_()
    for out in outputs(case_bits.clone(), case_lengths.clone()):
        assert not torch.allclose(out.double(), case.expected(), atol=1e-5)


def test_mistaken_arguments_are_named() -> None:
    case = make_case([tree_mask(chain(3))], [5])
    with pytest.raises(ValueError, match="isa='neon'"):
        dataclasses.replace(case, isa="neon").run()
    with pytest.raises(ValueError, match=r"float8_e4m3fn .* allowed: float32, bfloat16, float16"):
        dataclasses.replace(case, key_cache=case.key_cache.to(torch.float8_e4m3fn)).run()
    with pytest.raises(ValueError, match="multiple of the 2 KV heads"):
        dataclasses.replace(case, q=case.q[:, :3].contiguous()).run()
    with pytest.raises(ValueError, match="block size 16"):
        dataclasses.replace(case, key_cache=case.key_cache[:, :, :16]).run()
    with pytest.raises(ValueError, match="dense within a row"):
        case.attend(case.run().transpose(1, 2).contiguous().transpose(1, 2))


def test_features_that_a_kernel_does_not_serve_are_refused() -> None:
    case = make_case([tree_mask(chain(3))], [5])
    case.features = LayerFeatures(1.0, window=16, soft_cap=30.0)
    with pytest.raises(ValueError, match="'cpu' does not serve soft_cap, window"):
        case.run()
    with pytest.raises(ValueError, match="'reference' does not serve"):
        case.expected()
