"""Attention by xFormers: its dense inputs, and its result if it has operators."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent / "device"))
from attention_inputs import draft_masks
from paged_cases import make_case

from benchmarks.kernels.xformers_attention import dense_request


@pytest.mark.parametrize("layout", ["LBNHC", "BHLNC"])
def test_the_dense_inputs_of_a_request_pose_the_same_problem(layout: str) -> None:
    case = make_case(draft_masks(), [40, 0, 63], layout=layout)
    expected = case.expected()
    for r, ctx in enumerate(case.ctx_lens.tolist()):
        rows = case.rows(r)
        keys, values, bias = (
            x.cpu()
            for x in dense_request(
                case.kv_cache, case.block_table[r], ctx, case.bits[rows], 4, torch.float32
            )
        )
        assert bias.stride(-2) % 8 == 0
        scores = (
            torch.einsum("nhd,lhd->hnl", case.q[rows].cpu(), keys[0]) * case.features.scale
            + bias[0]
        )
        out = torch.einsum("hnl,lhd->nhd", scores.softmax(-1), values[0])
        torch.testing.assert_close(out.double(), expected[rows], atol=1e-5, rtol=1e-5)
