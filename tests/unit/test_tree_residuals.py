"""The table that corrects a draft: it converges, forgets, and keeps its bounds."""

from __future__ import annotations

import pytest
import torch
from reference.residuals import best_of, corrected, teach

from dyntree_kernels.residuals import BIASES, MOST_BIAS, Fading, ResidualTable
from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.residuals import FADING, buckets_of

CPU = torch.device("cpu")
NEVER = Fading(1.0, 1.0)


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Return KL(softmax(p) || softmax(q))."""
    log_p = p.log_softmax(-1)
    return float((log_p.exp() * (log_p - q.log_softmax(-1))).sum())


def learn(
    table: ResidualTable, target: torch.Tensor, draft: torch.Tensor, times: int,
    fading: Fading = FADING,
) -> torch.Tensor:  # fmt: skip
    """Teach the token 1 so often; return the draft's corrected logits."""
    for _ in range(times):
        found = corrected(table, draft[None], torch.tensor([1]))[0]
        teach(table, 1, target, best_of(found), fading)
    return corrected(table, draft[None], torch.tensor([1]))[0]


@pytest.mark.parametrize("vocabulary", [8, 16, 200])
def test_the_draft_comes_to_say_what_the_target_says(vocabulary: int) -> None:
    g = torch.Generator().manual_seed(vocabulary)
    target, draft = (2 * torch.randn(vocabulary, generator=g) for _ in range(2))
    table = ResidualTable.room(4, vocabulary, CPU)
    start = divergence(target, draft)
    some, many = (divergence(target, learn(table, target, draft, n)) for n in (20, 380))
    assert many < some < start
    assert many < (0.08 if vocabulary <= BIASES else 0.6) * start


def test_other_tokens_are_not_corrected() -> None:
    table = ResidualTable.room(4, 8, CPU)
    learn(table, torch.randn(8), torch.randn(8), 9)
    draft = torch.randn(1, 8)
    assert torch.equal(corrected(table, draft, torch.tensor([2])), draft)
    assert not torch.equal(corrected(table, draft, torch.tensor([5])), draft)  # of its bucket


def test_a_large_error_takes_the_place_of_the_least_bias() -> None:
    table = ResidualTable.room(4, 64, CPU)
    table.tokens[1], table.biases[1] = torch.arange(BIASES).int() + 30, 0.09
    table.biases[1, 5] = 0.001
    table.sums[1] = 1.0
    draft = torch.zeros(64)
    target = draft.clone()
    target[20] = 9.0
    teach(table, 1, target, best_of(draft), NEVER)
    assert 20 in table.tokens[1]
    assert 35 not in table.tokens[1]
    assert len(set(table.tokens[1].tolist())) == BIASES


def test_what_is_not_true_any_more_fades() -> None:
    g = torch.Generator().manual_seed(0)
    draft, target = torch.randn(8, generator=g), torch.randn(8, generator=g)
    table = ResidualTable.room(4, 8, CPU)
    learn(table, target, draft, 300)
    learned = table.biases.abs().sum()
    learn(table, draft, draft, 300)
    assert table.biases.abs().sum() < 0.6 * learned
    kept = ResidualTable(*(each.clone() for each in table))
    learn(table, draft, draft, 1, Fading(0.5, 1.0))
    learn(kept, draft, draft, 1, NEVER)
    assert table.biases.abs().sum() < 0.7 * kept.biases.abs().sum()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_bucket_that_is_not_finite_begins_anew(broken: float) -> None:
    table = ResidualTable.room(4, 8, CPU)
    learn(table, torch.randn(8), torch.randn(8), 3)
    table.biases[1, 2] = broken
    assert (table.tokens[1] >= 0).any()
    draft = torch.randn(8)
    assert corrected(table, draft[None], torch.tensor([1])).isfinite().all()
    teach(table, 1, torch.randn(8), best_of(draft))
    assert (table.tokens[1] == -1).all()
    assert (table.biases[1] == 0).all()


def test_biases_are_bounded() -> None:
    table = ResidualTable.room(4, 8, CPU)
    table.tokens[1, 0], table.biases[1, 0], table.sums[1, 0] = 3, MOST_BIAS - 0.01, 1e-9
    draft, target = torch.zeros(8), torch.zeros(8)
    target[3] = 9.0
    teach(table, 1, target, best_of(draft), NEVER)
    assert float(table.biases[1, 0]) == MOST_BIAS


def test_tokens_that_the_draft_does_not_have_are_not_learned() -> None:
    table = ResidualTable.room(4, 64, CPU)
    table.proposed[40] = False
    draft, target = torch.zeros(64), torch.zeros(64)
    target[40] = target[41] = 9.0
    teach(table, 1, target, best_of(draft))
    assert 41 in table.tokens
    assert 40 not in table.tokens


def test_large_vocabularies_share_buckets() -> None:
    assert buckets_of(1000) == 1000
    assert buckets_of(10**6) < 10**6


def test_it_is_off_unless_asked_for() -> None:
    assert not DynTreeOptions.parse({}).resolve(16).adapt
    assert DynTreeOptions.parse({"adapt": "on"}).resolve(16).adapt
    assert DynTreeOptions.parse({"adapt": True}).resolve(16, head=True).adapt


@pytest.mark.parametrize(
    ("options", "draft"),
    [
        ({}, False),
        ({"growth": "dyspec"}, True),
        ({"growth": "expansion", "expansion": [2, 2], "sampling": "best"}, True),
    ],
)
def test_it_is_refused_where_it_has_nothing_to_correct(
    options: dict[str, object], draft: bool
) -> None:
    with pytest.raises(ValueError, match=r"dyntree\.adapt=on"):
        DynTreeOptions.parse({"adapt": "on", **options}).resolve(16, draft=draft)
