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


def test_mistaken_arguments_are_named() -> None:
    case = make_case([tree_mask(chain(3))], [5])
    with pytest.raises(ValueError, match=r"must be \[T, H, V \+ R\]"):
        dataclasses.replace(case, q=case.q[..., :40].contiguous()).run()
    wide = torch.nn.functional.pad(case.bits, (0, 64))
    with pytest.raises(ValueError, match="2080 tree columns, at most 2048 are served"):
        dataclasses.replace(case, bits=wide).run(tiles=SMALL)
