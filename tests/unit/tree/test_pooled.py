"""Several drafts are one law: their mixture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from exactness import Grown, Model, distance, emitted_by_draws, grow_every_way, random_model

from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.pooled import mixture
from dyntree_plugin.tree.registry import DRAWN_RULES, RULES, plan_growth
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import Draws


def test_a_mixture_is_the_mean_of_the_distributions() -> None:
    logits = [3 * torch.randn(5, 11, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    expected = torch.stack([each.softmax(dim=1) for each in logits]).mean(dim=0)
    torch.testing.assert_close(mixture(logits).exp(), expected)
    assert (mixture(logits).exp() - logits[0].softmax(dim=1)).abs().max() > 0.1


def test_one_draft_is_left_as_it_is() -> None:
    logits = torch.randn(2, 4, dtype=torch.bfloat16)
    assert mixture([logits]) is logits


def test_a_token_that_one_draft_excludes_is_still_proposed() -> None:
    sure = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    other = torch.zeros(1, 3)
    torch.testing.assert_close(mixture([sure, other]).exp(), torch.tensor([[4 / 6, 1 / 6, 1 / 6]]))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_row_without_a_distribution_stays_without_one(broken: float) -> None:
    good, bad = torch.zeros(2, 3), torch.zeros(2, 3)
    bad[0, 1] = broken
    found = mixture([good, bad])
    assert not found[0].logsumexp(dim=0).isfinite()
    assert found[1].logsumexp(dim=0).isfinite()


@pytest.mark.parametrize("rule", ["multi_step", "without_replacement"])
def test_a_tree_drawn_from_a_mixture_emits_the_targets_law(rule: str) -> None:
    sampling = RULES[rule].default_for[0]
    config = GrowthConfig("expansion", (2, 1), sampling=sampling)
    plan = plan_growth(config, TreeShape(4, 2, 1, 2, coupling=False))
    drafts, target = [random_model(seed, 3, 3) for seed in (1, 2)], random_model(9, 3, 3)
    pooled = Model(tuple(mixture([a.log(), b.log()]).double().exp() for a, b in zip_laws(*drafts)))
    made = grow_every_way(plan, pooled)
    exact = emitted_by_draws(DRAWN_RULES[rule], made, target, 4)
    assert distance(exact, target) < 1e-6  # a mixture is made in float32
    # Control: the rule is told the law of the first draft, which the children were not drawn from.
    draws = made.tree.draws
    assert draws is not None
    told = one_draft_law(made, drafts[0], draws)
    biased = emitted_by_draws(DRAWN_RULES[rule], told, target, 4)
    assert distance(biased, target) > 0.005


def zip_laws(first: Model, second: Model) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(first.laws, second.laws, strict=True)


def one_draft_law(made: Grown, draft: Model, draws: Draws) -> Grown:
    """Return the same trees with the laws of one draft."""
    laws = draft.after(made.depths, made.codes).log().to(draws.log_probs.dtype)
    columns = torch.arange(laws.shape[1]).expand(laws.shape[:2])
    return replace(made, tree=replace(made.tree, draws=Draws(draws.nodes, columns, laws)))
