"""Compare Triton's tree attention over latent vectors with the oracles."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from attention_checks import AttentionChecks, assert_matches, tree_batch
from attention_inputs import tree_mask
from latent_inputs import make_latent_case
from paged_cases import DEVICE
from tree_shapes import chain

from dyntree_kernels.cuda.attention import Tiling
from dyntree_kernels.cuda.latent_attention import latent_tree_attention

ON_GPU = DEVICE.type == "cuda"
SMALL = Tiling(16, 32, 4, 2)
make_case = partial(make_latent_case, latent_tree_attention, device=DEVICE.type)


class TestLatentAttentionOnTheDevice(AttentionChecks):
    kernel = "triton"
    make = staticmethod(make_case)
    ways = ({"splits": 1, "tiles": SMALL}, {"splits": 3, "tiles": SMALL})
    contexts = (0, 17, 95)
    few = not ON_GPU


@pytest.mark.parametrize(("heads", "dtype"), [(5, torch.float32), (16, torch.float16)])
def test_ragged_batches_of_deepseeks_size(heads: int, dtype: torch.dtype) -> None:
    shape = {"head_size": 576, "rope": 64, "block_size": 64}
    case = make_case(tree_batch(17, 1, 9), [50, 0, 33], heads=heads, dtype=dtype, **shape)
    assert_matches(case)


@pytest.mark.parametrize("splits", [1, 3])
def test_the_logarithms_of_the_softmaxs_sums(splits: int) -> None:
    case = make_case(tree_batch(17, 5), [40, 0])
    lse = torch.zeros(case.q.shape[:2], device=DEVICE)
    assert_matches(case, lse=lse, splits=splits)
    for r, (mask, keys) in enumerate(zip(case.masks, case.keys, strict=True)):
        seen = torch.nn.functional.pad(mask, (int(case.ctx_lens[r]), 0), value=True)
        q = case.q[case.rows(r)].cpu().double()
        scores = torch.einsum("nhd,ld->nhl", q, keys[:, 0].double()) * case.features.scale
        expected = scores.masked_fill(~seen[:, None], -torch.inf).logsumexp(-1)
        torch.testing.assert_close(lse[case.rows(r)].cpu().double(), expected, atol=1e-5, rtol=1e-5)


def test_mistaken_arguments_are_named() -> None:
    case = make_case([tree_mask(chain(3))], [5])
    with pytest.raises(ValueError, match=r"must be \[T, H, V \+ R\]"):
        dataclasses.replace(case, q=case.q[..., :40].contiguous()).run()
    wide = torch.nn.functional.pad(case.bits, (0, 64))
    with pytest.raises(ValueError, match="2080 tree columns, at most 2048 are served"):
        dataclasses.replace(case, bits=wide).run(tiles=SMALL)
