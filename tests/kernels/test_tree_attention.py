"""Tree attention on the CPU against a dense oracle and a replay of every path from the root."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from attention_checks import FeatureChecks, assert_matches, rounds_as
from attention_inputs import tree_mask
from packed_cases import make_case
from position_checks import PositionChecks
from tree_shapes import chain, random_tree

from dyntree_kernels.cpu.attention import PackedCache, TreeAttention
from dyntree_kernels.cpu.simd import tanh


class TestTreeAttention(FeatureChecks):
    kernel = "cpu"
    make = staticmethod(make_case)
    layouts = ({}, {"isa": "amx", "dtype": torch.bfloat16})
    quantised = (
        {"kv_dtype": torch.float8_e4m3fn},
        {"kv_dtype": torch.float8_e4m3fn, "isa": "amx", "dtype": torch.bfloat16},
    )
    ways = ({}, {"by_path": True})
    contexts = (0, 1, 31, 32, 33, 95, 200)


class TestOrderOfPositions(PositionChecks):
    make = staticmethod(make_case)
    layouts = (
        {"kv_heads": 1, "group": 7},
        {"dtype": torch.float16, "kv_heads": 1, "group": 1, "head_size": 64},
        {"isa": "amx", "dtype": torch.bfloat16, "head_size": 48, "block_size": 64},
        {"isa": "amx", "dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn},
        {},
    )


@pytest.mark.parametrize(("group", "block_size"), [(1, 128), (4, 32), (7, 32)])
@pytest.mark.parametrize(
    ("isa", "dtype", "head_size"),
    [
        ("vec", torch.float32, 32),
        ("vec", torch.float32, 128),
        ("vec16", torch.float32, 80),
        ("vec", torch.float16, 64),
        ("vec", torch.bfloat16, 128),
        ("vec16", torch.bfloat16, 112),
        ("amx", torch.bfloat16, 32),
        ("amx", torch.bfloat16, 128),
    ],
)
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


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chain_agrees_with_the_stock_causal_kernel(
    dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    ops = pytest.importorskip("vllm._custom_ops", reason="needs vLLM's attention operator")
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        pytest.skip("this vLLM was not built for the CPU")
    if kv_dtype and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM quantises the cache with AVX-512 alone")
    masks = [tree_mask(chain(n)) for n in (17, 40)]
    case = make_case(masks, [100, 33], head_size=64, dtype=dtype, kv_dtype=kv_dtype)
    caches = {"key_cache": case.key_cache, "value_cache": case.value_cache}
    of_scales = {}
    if kv_dtype:
        scales = {"key_scale": 0.7, "value_scale": 1.9}
        own = {name: torch.tensor(scale) for name, scale in scales.items()}
        case.features = dataclasses.replace(case.features, **own)
        of_scales = {"k_scale": 0.7, "v_scale": 1.9, "kv_cache_dtype": "fp8"}
        caches = {name: cache.view(torch.uint8) for name, cache in caches.items()}
    else:
        case.without_nan()  # vLLM's kernel multiplies whole blocks
    seq_lens = (case.ctx_lens + torch.tensor([17, 40])).int()
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=2, num_heads=4, num_kv_heads=2, head_dim=64, seq_lens=seq_lens, dtype=dtype,
        query_start_loc=case.qo_indptr, causal=True, sliding_window_size=-1, isa="vec",
        enable_kv_split=False, kv_cache_dtype=of_scales.get("kv_cache_dtype", "auto"),
    )  # fmt: skip
    stock = torch.empty_like(case.q)
    ops.cpu_attention_with_kv_cache(
        query=case.q, **caches, output=stock, query_start_loc=case.qo_indptr, seq_lens=seq_lens,
        scale=case.features.scale, causal=True, alibi_slopes=None, sliding_window=-1,
        block_table=case.block_table, softcap=0.0, scheduler_metadata=metadata, s_aux=None,
        **of_scales,
    )  # fmt: skip
    expected, out = case.expected(), case.run().double()
    error, stock_error = (out - expected).abs().max(), (stock.double() - expected).abs().max()
    assert error <= 2 * stock_error
    if dtype == torch.bfloat16:
        assert rounds_as(stock, case.run(truncate=True), case.run(truncate=False))


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
    with pytest.raises(ValueError, match=r"float8_e5m2 .* allowed: float32, bfloat16, float16"):
        dataclasses.replace(case, key_cache=case.key_cache.to(torch.float8_e5m2)).run()
    with pytest.raises(ValueError, match="multiple of the 2 KV heads"):
        dataclasses.replace(case, q=case.q[:, :3].contiguous()).run()
    with pytest.raises(ValueError, match="block size 16"):
        dataclasses.replace(case, key_cache=case.key_cache[:, :, :16]).run()
    with pytest.raises(ValueError, match="dense within a row"):
        case.attend(case.run().transpose(1, 2).contiguous().transpose(1, 2))


def test_tanh_is_numpys() -> None:
    magnitudes = np.geomspace(1e-6, 40, 1000, dtype=np.float32)
    x = np.concatenate([-magnitudes, magnitudes])
    found = np.array([tanh(each) for each in x])
    np.testing.assert_allclose(found, np.tanh(x.astype(np.float64)), rtol=5e-7)
    assert np.isnan(tanh(np.float32(np.nan)))
