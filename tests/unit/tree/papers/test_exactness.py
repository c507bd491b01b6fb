"""Every allowed pair of growth and rule emits the target's law exactly; forbidden pairs do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from exactness import (
    Grown,
    Model,
    distance,
    drawn_as_listed,
    emitted_by_draws,
    emitted_by_match,
    grow_best,
    grow_every_way,
    one_hot,
    random_model,
    uniform,
)

from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.pairs import all_pairs
from dyntree_plugin.tree.registry import DRAWN_RULES, plan_growth
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import Draws, TokenTree

WR, IID, BEST = "without_replacement", "with_replacement", "best"
EXACT = 1e-12
BIASED = 0.01


def shape(node_budget: int, max_depth: int, width: int, children: int) -> TreeShape:
    return TreeShape(node_budget, max_depth, width, children, coupling=False)


Case = tuple[GrowthConfig, TreeShape, int]

# Growth, shape, vocabulary. Of each growth and sampling, the first shows forbidden rules' bias.
CASES: list[Case] = [
    (GrowthConfig("topk"), shape(4, 2, 2, 2), 3),
    (GrowthConfig("topk"), shape(5, 3, 1, 2), 3),
    (GrowthConfig("dyspec"), shape(4, 2, 1, 3), 3),
    (GrowthConfig("dyspec"), shape(4, 3, 1, 3), 3),
    (GrowthConfig("threshold", 0.25), shape(5, 2, 1, 3), 3),
    (GrowthConfig("sequoia", (0.6, 0.3, 0.1), sampling=WR), shape(4, 2, 1, 3), 3),
    (GrowthConfig("sequoia", (0.6, 0.3), sampling=BEST), shape(4, 2, 1, 2), 3),
    (GrowthConfig("expansion", (2, 1), sampling=IID), shape(4, 2, 1, 2), 3),
    (GrowthConfig("expansion", (2, 1, 2), sampling=IID), shape(8, 3, 1, 2), 2),
    (GrowthConfig("expansion", (2, 1), sampling=WR), shape(4, 2, 1, 2), 3),
    (GrowthConfig("expansion", (2, 1), sampling=BEST), shape(4, 2, 1, 2), 3),
    (GrowthConfig("chain", sampling=WR), shape(2, 2, 1, 1), 3),
    (GrowthConfig("chain", sampling=IID), shape(3, 3, 1, 1), 3),
    (GrowthConfig("chain", sampling=BEST), shape(3, 3, 1, 1), 3),
]


def name_of(case: Case) -> str:
    config, tree_shape, vocab = case
    plan = plan_growth(config, tree_shape)
    return f"{config.name}-{plan.sampling}-depth{tree_shape.max_depth}-vocab{vocab}"


def models(vocab: int, depth: int) -> Iterator[tuple[Model, Model]]:
    """Yield draft and target pairs, ordinary and degenerate."""
    length = depth + 1
    ordinary = [random_model(seed, vocab, length) for seed in range(4)]
    sparse = [random_model(seed, vocab, length, zeros=0.5) for seed in (5, 6)]
    sharp = random_model(7, vocab, length, sharpness=3.0)
    yield ordinary[0], ordinary[1]
    yield sharp, ordinary[2]
    yield ordinary[3], sharp
    yield sparse[0], ordinary[0]
    yield ordinary[1], sparse[1]
    yield sparse[0], sparse[1]
    yield ordinary[2], one_hot(ordinary[3])
    yield one_hot(ordinary[3]), ordinary[2]
    yield uniform(ordinary[0]), ordinary[0]
    yield ordinary[0], ordinary[0]


@cache
def grown(case: Case, which: int) -> tuple[Grown, Model]:
    config, tree_shape, vocab = case
    plan = plan_growth(config, tree_shape)
    draft, target = list(models(vocab, tree_shape.max_depth))[which]
    made = grow_best(tree_shape, draft) if plan.start is None else grow_every_way(plan, draft)
    if plan.sampling == BEST:
        # Give the rules for drawn children a tree that claims to be drawn.
        laws = draft.after(made.depths, made.codes).log()
        made = replace(made, tree=drawn_as_listed(made.tree, laws))
    return made, target


def emitted(
    rule: str, made: Grown, target: Model, scheduled: int | torch.Tensor | None = None
) -> torch.Tensor:
    nodes = made.tree.tokens.shape[1] if scheduled is None else scheduled
    if rule == "match":
        return emitted_by_match(made, target, nodes)
    return emitted_by_draws(DRAWN_RULES[rule], made, target, nodes)


def rules_of(case: Case, allowed: bool) -> list[str]:
    name, sampling = case[0].name, plan_growth(*case[:2]).sampling
    return [
        pair.rule
        for pair in all_pairs()
        if (pair.growth, pair.sampling, pair.allowed) == (name, sampling, allowed)
    ]


def first_of_their_kind(cases: list[Case]) -> list[Case]:
    kinds = {(case[0].name, plan_growth(*case[:2]).sampling): case for case in reversed(cases)}
    return list(kinds.values())


ALLOWED = [(case, rule) for case in CASES for rule in rules_of(case, True)]
FORBIDDEN = [(c, rule) for c in first_of_their_kind(CASES) for rule in rules_of(c, False)]
ALL_MODELS = range(10)
# Sample-and-match does not read the draft, and enumerating the target's draws takes long.
SOME_MODELS = (0, 5, 8)

allowed_pairs = pytest.mark.parametrize(
    ("case", "rule"), ALLOWED, ids=[f"{name_of(case)}-{rule}" for case, rule in ALLOWED]
)
forbidden_pairs = pytest.mark.parametrize(
    ("case", "rule"), FORBIDDEN, ids=[f"{name_of(case)}-{rule}" for case, rule in FORBIDDEN]
)


def test_every_pair_is_among_the_cases():
    tried = {
        (case[0].name, plan_growth(*case[:2]).sampling, rule) for case, rule in ALLOWED + FORBIDDEN
    }
    assert tried == {(pair.growth, pair.sampling, pair.rule) for pair in all_pairs()}


@allowed_pairs
def test_an_allowed_pair_emits_the_targets_law(case: Case, rule: str):
    for which in SOME_MODELS if rule == "match" else ALL_MODELS:
        made, target = grown(case, which)
        assert distance(emitted(rule, made, target), target) < EXACT


@allowed_pairs
def test_an_allowed_pair_stays_exact_when_only_the_first_nodes_are_verified(case: Case, rule: str):
    made, target = grown(case, 0)
    nodes = made.tree.tokens.shape[1]
    for scheduled in (1, nodes - 1):
        assert distance(emitted(rule, made, target, scheduled), target) < EXACT


@forbidden_pairs
def test_a_forbidden_pair_is_biased(case: Case, rule: str):
    laws = [grown(case, which) for which in ALL_MODELS]
    worst = max(distance(emitted(rule, made, target), target) for made, target in laws)
    assert worst > BIASED


def test_a_tree_that_is_cut_by_its_nodes_own_values_is_biased():
    """If a cut has looked at the tokens, only rules that ignore the draws stay exact."""
    case = (GrowthConfig("dyspec"), shape(6, 2, 1, 3), 3)
    worst = dict.fromkeys(("match", "without_replacement"), 0.0)
    for which in SOME_MODELS:
        made, target = grown(case, which)
        cut = most_valuable(made, 3)
        for rule in worst:
            worst[rule] = max(worst[rule], distance(emitted(rule, cut, target), target))
    assert worst["match"] < EXACT
    assert worst["without_replacement"] > BIASED


def most_valuable(made: Grown, count: int) -> Grown:
    """Keep the ``count`` nodes with the highest own values, as EAGLE-2 (arXiv 2406.16858)
    reranks."""
    tree, draws = made.tree, made.tree.draws
    assert draws is not None
    order = tree.values.argsort(dim=1, descending=True, stable=True)
    keep = order[:, :count].sort(dim=1).values
    became = torch.full((len(keep), tree.tokens.shape[1] + 1), -1)
    became.scatter_(1, keep + 1, torch.arange(count).expand_as(keep))
    rows = torch.nn.functional.pad(keep + 1, (1, 0))
    nodes = draws.nodes.gather(1, rows[:, :, None].expand(-1, -1, draws.nodes.shape[2]))
    nodes = became.gather(1, (nodes + 1).flatten(1)).view_as(nodes)
    # Close the gaps that the cut nodes leave among the draws.
    nodes = nodes.gather(2, (nodes < 0).int().argsort(dim=2, stable=True))
    parents = became.gather(1, tree.parents.gather(1, keep) + 1)
    columns = draws.columns.gather(1, rows)
    cut = TokenTree(
        tree.tokens.gather(1, keep),
        parents,
        tree.depths.gather(1, keep),
        tree.values.gather(1, keep),
        tree.counts.clamp(max=count),
        Draws(nodes, columns, draws.log_probs),
    )
    return Grown(cut, made.chances, made.codes.gather(1, rows), made.depths.gather(1, rows))


def test_to_schedule_as_many_nodes_as_independent_draws_gave_is_biased():
    """The number of nodes reveals which draws coincided. The number of places for them does not."""
    case = (GrowthConfig("expansion", (2,)), shape(2, 1, 1, 2), 3)
    worst = 0.0
    for which in ALL_MODELS:
        made, target = grown(case, which)
        assert distance(emitted("multi_step", made, target), target) < EXACT
        by_count = emitted("multi_step", made, target, made.tree.counts)
        worst = max(worst, distance(by_count, target))
    assert worst > BIASED
