"""Compare Triton's tree attention over latent vectors with the oracles."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from attention_checks import AttentionChecks, assert_matches, on, tree_batch
from attention_inputs import tree_mask
from device_order import ON_GPU, SMALL, OrderOnTheDevice
from latent_inputs import make_latent_case
from paged_cases import DEVICE
from tree_shapes import chain

from dyntree_kernels.cuda.latent_attention import latent_tree_attention
from dyntree_kernels.cuda.path_attention import PathColumns, path_attention

FLOAT8 = torch.float8_e4m3fn


def attend(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, contexts: torch.Tensor,
    starts: torch.Tensor, bits: torch.Tensor, *, by_path: bool = False, chains: bool = False,
    **given: Any,
) -> None:  # fmt: skip
    """``chains``: with ``by_path``, take all requests for ones without a tree."""
    if not by_path:
        latent_tree_attention(q, cache, table, contexts, starts, bits, **given)
        return
    if chains:
        given["seq_lens"] = contexts + torch.diff(starts)
        contexts = torch.full_like(contexts, -1)
    path_attention(q, cache[:, None], table, contexts, starts, PathColumns.of(bits), **given)


make_case = partial(make_latent_case, attend, device=DEVICE.type)


class TestLatentAttentionOnTheDevice(AttentionChecks):
    kernel = "triton"
    make = staticmethod(make_case)
    ways = (
        *({"splits": splits, "tiles": SMALL} for splits in (1, 3)),
        {"by_path": True, "tiles": SMALL},
    )
    contexts = (0, 17, 95)
    few = not ON_GPU


class TestOrderOfLatentPositionsOnTheDevice(OrderOnTheDevice):
    make = staticmethod(make_case)
    layouts = (
        {"heads": 3},
        *([{"heads": 16, "dtype": torch.bfloat16, "head_size": 576, "rope": 64}] if ON_GPU else []),
    )


@pytest.mark.parametrize(("heads", "dtype"), [(5, torch.float32), (16, torch.float16)])
def test_ragged_batches_of_deepseeks_size(heads: int, dtype: torch.dtype) -> None:
    shape = {"head_size": 576, "rope": 64, "block_size": 64}
    case = make_case(tree_batch(17, 1, 9), [50, 0, 33], heads=heads, dtype=dtype, **shape)
    assert_matches(case)


@pytest.mark.parametrize("of_queries", [None, FLOAT8])
def test_quantised_caches_and_queries_have_scales(of_queries: torch.dtype | None) -> None:
    case = make_case(tree_batch(9, 4), [60, 0], kv_dtype=FLOAT8)
    scales = {"query_scale": torch.tensor(2.1), "key_scale": torch.tensor(0.6)}
    if of_queries is None:
        del scales["query_scale"]
    case.features = dataclasses.replace(
        case.features, **on(DEVICE, scales | {"value_scale": scales["key_scale"]})
    )
    given = case.q.to(of_queries or case.q.dtype)
    case.q = given.to(case.q.dtype)
    expected = case.expected()
    for way in TestLatentAttentionOnTheDevice.ways:
        out = torch.full(case.out_shape, torch.nan, device=DEVICE)
        dataclasses.replace(case, q=given).attend(out, **way)
        torch.testing.assert_close(out.double().cpu(), expected, atol=1e-5, rtol=2e-5)
        for name in (*scales, "value_scale"):
            wrong = dataclasses.replace(case.features, **{name: None})
            dataclasses.replace(case, q=given, features=wrong).attend(out, **way)
            differs = ~torch.isclose(out.double().cpu(), expected, atol=1e-3, rtol=1e-3)
            assert differs.flatten(1).any(1).sum() > 9


def test_mistaken_arguments_are_named() -> None:
    case = make_case([tree_mask(chain(3))], [5])
    with pytest.raises(ValueError, match=r"must be \[T, H, V \+ R\]"):
        dataclasses.replace(case, q=case.q[..., :40].contiguous()).run()
    windowed = dataclasses.replace(case.features, window=16)
    with pytest.raises(ValueError, match="'latent, triton' does not serve window"):
        dataclasses.replace(case, features=windowed).run()
    wide = torch.nn.functional.pad(case.bits, (0, 64))
    with pytest.raises(ValueError, match="2080 tree columns, at most 2048 are served"):
        dataclasses.replace(case, bits=wide).run(tiles=SMALL)
