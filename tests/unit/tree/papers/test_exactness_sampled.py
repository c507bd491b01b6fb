"""The rules with real noise: tokens of many seeded runs against the target's law, by chi-square."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exactness import Model, random_model
from scipy.stats import chisquare

from dyntree_plugin.tree.children import drawn_children, sampled_children
from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.papers.drawn import DrawnRule, DrawnWalk, Odds
from dyntree_plugin.tree.registry import DRAWN_RULES, plan_growth
from dyntree_plugin.tree.shape import TreeShape

RUNS = 40_000
VOCAB = 4
# Draft and target differ much, so that a wrong rule is wrong by much.
DRAFT = random_model(2, VOCAB, 2)
TARGET = random_model(4, VOCAB, 2, zeros=0.2)
SURELY_BIASED = 1e-6
# Seeds are fixed, so the test cannot be flaky.
UNSUSPICIOUS = 0.01


def gumbel(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return -torch.empty(shape).exponential_(generator=generator).log()


def p_value(rule: DrawnRule, sampling: str, seed: int, common_noise: bool = False) -> float:
    """Return the chi-square p-value of the first two tokens, from trees of depth 1 and their bonus
    tokens.

    With ``common_noise``, the last token is drawn with the noise of the root's children.
    """
    generator = torch.Generator().manual_seed(seed)
    config = GrowthConfig("expansion", (2,), sampling=sampling)
    growth = plan_growth(config, TreeShape(2, 1, 1, 2)).start(RUNS, torch.zeros(RUNS).long())
    log_draft = DRAFT.laws[0].log().float().expand(RUNS, -1)
    if sampling == "without_replacement":
        draft_noise = gumbel(RUNS, VOCAB, generator=generator)
        children = sampled_children(log_draft, 2, draft_noise)
    else:
        draft_noise = gumbel(RUNS, 2, VOCAB, generator=generator)
        children = drawn_children(log_draft, 2, draft_noise)
        draft_noise = draft_noise[:, 0]
    growth.add(*(c[:, None] for c in children), log_draft[:, None])
    tree = growth.finish()
    assert tree.draws is not None

    def target(at: torch.Tensor) -> torch.Tensor:
        token = tree.tokens.gather(1, at.clamp(min=0)[:, None])[:, 0]
        below = TARGET.laws[1].float()[token]
        return torch.where((at < 0)[:, None], TARGET.laws[0].float(), below)

    uniforms = torch.rand(RUNS, 1, 2, generator=generator)
    room = torch.full((RUNS,), 2)
    walk = rule.walk(tree.tokens, tree.draws, room, target, uniforms)
    noise = draft_noise if common_noise else gumbel(RUNS, VOCAB, generator=generator)
    return first_two_tokens(walk, tree.tokens, noise, TARGET, generator)


def first_two_tokens(
    walk: DrawnWalk,
    tokens: torch.Tensor,
    noise: torch.Tensor,
    target: Model,
    generator: torch.Generator,
) -> float:
    accepted = walk.emit(tokens, noise)
    first, second = accepted.tokens.unbind(1)
    # If the walk ended at the root, the target draws the second token.
    more = torch.multinomial(target.laws[1][first], 1, generator=generator)[:, 0]
    second = torch.where(accepted.lengths == 0, more, second)
    seen = torch.bincount(first * VOCAB + second, minlength=VOCAB**2).double()
    expected = target.tails()[0] * RUNS
    assert float(seen[expected == 0].sum()) == 0
    return float(chisquare(seen[expected > 0], expected[expected > 0]).pvalue)


OWN_DRAWS = pytest.mark.parametrize(
    ("name", "sampling"),
    [("without_replacement", "without_replacement"), ("multi_step", "with_replacement")],
)


@OWN_DRAWS
def test_sampled_tokens_follow_the_target(name: str, sampling: str):
    for seed in range(3):
        assert p_value(DRAWN_RULES[name], sampling, seed) > UNSUSPICIOUS


@OWN_DRAWS
def test_a_rule_that_keeps_the_target_after_a_rejection_is_noticed(name: str, sampling: str):
    rule = DRAWN_RULES[name]

    def no_residual(target: torch.Tensor, *rest: torch.Tensor) -> Odds:
        return replace(rule.odds(target, *rest), residual=target)

    assert p_value(replace(rule, odds=no_residual), sampling, 0) < SURELY_BIASED


@OWN_DRAWS
def test_noise_in_common_with_the_draft_is_noticed(name: str, sampling: str):
    assert p_value(DRAWN_RULES[name], sampling, 0, common_noise=True) < SURELY_BIASED


def test_the_other_rules_draws_are_noticed():
    multi_step, without = DRAWN_RULES["multi_step"], DRAWN_RULES["without_replacement"]
    assert p_value(multi_step, "without_replacement", 0) < SURELY_BIASED
    assert p_value(without, "with_replacement", 0) < SURELY_BIASED
