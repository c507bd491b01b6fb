"""Tree attention over latent vectors on the CPU: every device's checks, and vLLM's own kernel."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from attention_checks import TOLERANCE, AttentionChecks, assert_matches, rounds_as
from attention_inputs import tree_mask
from latent_inputs import make_latent_case
from position_checks import OrderChecks
from tree_shapes import chain, random_tree

from dyntree_kernels.cpu.latent_attention import LatentTreeAttention

DEEPSEEK = {"head_size": 576, "rope": 64}


def attend(q: torch.Tensor, cache: torch.Tensor, *rows: torch.Tensor, **of_layer: Any) -> None:
    options = {name: of_layer.pop(name, False) for name in ("truncate", "by_path")}
    LatentTreeAttention(*rows, **options)(q, cache, **of_layer)


make_case = partial(make_latent_case, attend)


class TestLatentAttention(AttentionChecks):
    kernel = "cpu"
    make = staticmethod(make_case)
    ways = ({}, {"by_path": True})
    contexts = (0, 1, 31, 32, 33, 95, 200)


class TestOrderOfPositions(OrderChecks):
    make = staticmethod(make_case)
    layouts = ({"heads": 3}, {"heads": 16, "dtype": torch.bfloat16, **DEEPSEEK})


@pytest.mark.parametrize(
    ("heads", "dtype"), [(1, torch.float16), (2, torch.bfloat16), (16, torch.float32)]
)
def test_ragged_batches_of_deepseeks_size(heads: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(heads)
    masks = [tree_mask(random_tree(nodes, g)) for nodes in (17, 1, 40, 5)]
    assert_matches(make_case(masks, [50, 0, 33, 300], heads=heads, dtype=dtype, **DEEPSEEK))


@pytest.mark.parametrize("block_size", [1, 16, 24, 64])
def test_blocks_of_any_size_within_a_larger_one(block_size: int) -> None:
    """A page of several layers has more vectors than a block of one."""
    case = make_case([tree_mask(random_tree(20, torch.Generator().manual_seed(2)))], [45],
                     block_size=block_size)  # fmt: skip
    wide = torch.full((len(case.cache), block_size + 3, case.cache.shape[2] + 16), torch.nan)
    wide[:, :block_size, : case.cache.shape[2]] = case.cache
    view = wide[:, :block_size, : case.cache.shape[2]]
    assert torch.equal(dataclasses.replace(case, cache=view).run(), case.run())
    assert_matches(case)


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    masks = [tree_mask(random_tree(n, torch.Generator().manual_seed(n))) for n in (64, 30)]
    case = make_case(masks, [500, 900], **DEEPSEEK)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = case.run()
        torch.set_num_threads(2)
        assert torch.equal(case.run(), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_agrees_with_vllms_decoding(dtype: torch.dtype) -> None:
    ops = pytest.importorskip("vllm._custom_ops", reason="needs vLLM's attention operator")
    if not hasattr(torch.ops._C, "mla_decode_kvcache"):
        pytest.skip("this vLLM was not built for the CPU")
    case = make_case([tree_mask(chain(1))] * 2, [100, 33], heads=16, dtype=dtype, **DEEPSEEK)
    case.without_nan()
    stock = torch.zeros(case.out_shape, dtype=dtype)
    lengths = (case.ctx_lens + 1).int()
    ops.mla_decode_kvcache_cpu(
        stock, case.q, case.cache, case.features.scale, case.block_table, lengths
    )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(case.run(), stock, atol=tolerance, rtol=tolerance)
    if dtype == torch.bfloat16:
        assert rounds_as(stock, case.run(truncate=True), case.run(truncate=False))


def test_scores_need_all_elements_of_a_vector() -> None:
    case = make_case([tree_mask(chain(5))], [20])
    case.without_nan()
    without = case.q.clone()
    without[..., -16:] = 0
    lacking = dataclasses.replace(case, q=without).run().double()
    assert (lacking - case.expected()).abs().amax(-1).min() > 1e-3


def test_mistaken_arguments_are_named() -> None:
    case = make_case([tree_mask(chain(3))], [5])
    with pytest.raises(ValueError, match=r"must be \[T, H, D\], \[T, H, V\] and \[blocks, N, D\]"):
        dataclasses.replace(case, q=case.q[..., :32].contiguous()).run()
    with pytest.raises(ValueError, match=r"float8_e4m3fn .* allowed: float32, bfloat16, float16"):
        dataclasses.replace(case, cache=case.cache.to(torch.float8_e4m3fn)).run()
    scaled = dataclasses.replace(case.features, key_scale=torch.ones(()))
    with pytest.raises(ValueError, match="'latent, cpu' does not serve key_scale"):
        dataclasses.replace(case, features=scaled).run()
    with pytest.raises(ValueError, match="vectors of the cache must be dense"):
        dataclasses.replace(case, cache=case.cache.mT.contiguous().mT).run()
