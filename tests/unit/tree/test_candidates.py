"""Children from a draft's logits: what has no chance or no distribution, and chains."""

from __future__ import annotations

import pytest
import torch

from dyntree_plugin.tree.children import drawn_children, sampled_children, top_children

LAW = torch.tensor([0.5, 0.3, 0.2, 0.0])


def gumbel(*shape: int) -> torch.Tensor:
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return -uniform.log().neg().log()


@pytest.mark.parametrize("count", [3, 4, 6])
def test_what_cannot_be_drawn_has_no_probability(count: int) -> None:
    tokens, log_probs = sampled_children(LAW.log().expand(2, -1), count, gumbel(2, 4))
    assert tokens.shape == log_probs.shape == (2, count)
    assert sorted(tokens[0, :3].tolist()) == [0, 1, 2]
    assert torch.equal(log_probs[:, :3], LAW.log()[tokens[:, :3]])
    assert (log_probs[:, 3:] == float("-inf")).all()


def test_rows_of_a_chain_have_one_child() -> None:
    log_probs, chain = LAW.log().expand(2, -1), torch.tensor([True, False])
    for _, found in (
        top_children(log_probs, 2, chain),
        sampled_children(log_probs, 2, gumbel(2, 4), chain),
        drawn_children(log_probs, 2, gumbel(2, 2, 4), chain),
    ):
        assert found.isfinite().tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("whole", [True, False])
def test_a_row_without_a_distribution_has_no_best_children(broken: float, whole: bool) -> None:
    scores = LAW.log().repeat(2, 1)
    scores[0, slice(None) if whole or broken < 0 else 2] = broken
    tokens, found = top_children(scores, 3)
    assert ((tokens >= 0) & (tokens < 4)).all()
    assert (found[0] == float("-inf")).all()
    assert found[1].isfinite().all()
