"""Logits and tokens of a draft whose vocabulary has another size than the target's."""

from __future__ import annotations

import pytest
import torch

from dyntree_plugin.tree.padded import of_width, readable
from dyntree_plugin.tree.pooled import mixture


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_that_the_draft_lacks_has_no_chance(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 5, dtype=dtype)
    found = of_width(logits, 7)
    assert found.dtype == dtype
    assert torch.equal(found[:, :5], logits)
    assert found[:, 5:].isneginf().all()


def test_a_token_beyond_the_targets_is_left_out_without_a_copy() -> None:
    logits = torch.randn(3, 5)
    found = of_width(logits, 4)
    assert torch.equal(found, logits[:, :4])
    assert found.data_ptr() == logits.data_ptr()


def test_equal_sizes_cost_nothing() -> None:
    logits, ids = torch.randn(3, 5), torch.arange(5)
    assert of_width(logits, 5) is logits
    assert readable(ids, 5, 5) is ids
    assert readable(ids, 5, 9) is ids


def test_a_token_beyond_the_drafts_embedding_is_read_as_its_last() -> None:
    assert readable(torch.tensor([0, 3, 4, 8]), 9, 4).tolist() == [0, 3, 3, 3]


def test_drafts_of_different_sizes_have_a_mixture() -> None:
    narrow, wide = torch.randn(2, 4), torch.randn(2, 9)
    found = mixture([of_width(narrow, 6), of_width(wide, 6)]).exp()
    wanted = torch.cat([narrow.softmax(1), torch.zeros(2, 2)], dim=1) + wide[:, :6].softmax(1)
    torch.testing.assert_close(found, wanted / 2)
