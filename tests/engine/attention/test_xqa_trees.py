"""XQA gets the rows and the lengths of the batch that its plan was made for."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from attention_checks import tree_batch
from paged_cases import Case, make_case
from xqa_in_torch import Library

from dyntree_kernels.cuda import xqa
from dyntree_kernels.cuda.xqa import Xqa, XqaTreeAttention
from dyntree_plugin.engine.attention.kernels import AttentionRows, XqaTrees

GROUP, KV_HEADS, PAGE, SIZE = 2, 2, 16, 64
MODULE = Xqa(torch.bfloat16, SIZE, GROUP, PAGE)


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    library = Library()
    library.built.add(MODULE._arguments(2)[:-2])
    monkeypatch.setitem(sys.modules, "flashinfer.xqa", library)
    xqa._loaded.cache_clear()
    return make_case(
        tree_batch(9, 1, 17), [50, 3, 40], group=GROUP, kv_heads=KV_HEADS, head_size=SIZE,
        block_size=PAGE, dtype=torch.bfloat16, layout="LBNHC", poison=0.0,
    )  # fmt: skip


def rows_of(case: Case) -> AttentionRows:
    counts = torch.diff(case.qo_indptr)
    return AttentionRows(
        case.block_table, case.ctx_lens, case.qo_indptr, case.bits, len(case.q), int(counts.max()),
        case.qo_indptr, None, seq_lens=case.ctx_lens + counts,
    )  # fmt: skip


def attended(case: Case, rows: AttentionRows) -> torch.Tensor:
    """Return the output, whose tensors have padding after the rows of the batch."""
    q, out = (torch.cat([each, each[:3]]) for each in (case.q, torch.zeros_like(case.q)))
    kernel = XqaTrees(XqaTreeAttention(MODULE, KV_HEADS, case.bits.shape[1], 4, case.q.device))
    kernel.plan(rows)(q, case.kv_cache, out, case.features)
    assert not out[rows.num_rows :].any()
    return out[: rows.num_rows].double()


def test_xqa_attends_to_the_trees_of_a_batch(case: Case) -> None:
    rows = rows_of(case)
    torch.testing.assert_close(attended(case, rows), case.expected(), atol=1e-2, rtol=2e-2)
    assert rows.seq_lens is not None
    for broken in (
        replace(rows, seq_lens=rows.seq_lens - 1),
        replace(rows, ancestor_bits=rows.ancestor_bits.roll(1, dims=0)),
    ):
        found = attended(case, broken)
        assert not torch.allclose(found, case.expected(), atol=1e-2, rtol=2e-2)


def test_rows_of_drafts_are_refused(case: Case) -> None:
    kernel = XqaTrees(XqaTreeAttention(MODULE, KV_HEADS, case.bits.shape[1], 4, case.q.device))
    with pytest.raises(RuntimeError, match="XQA serves no drafts"):
        kernel.plan(replace(rows_of(case), seq_lens=None))
