"""Traversal verification: its law by enumeration, for every growth of drawn children."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from exactness import (
    Grown,
    Model,
    continued,
    distance,
    drawn_as_listed,
    grow_every_way,
    of_best_tokens,
)
from reference import traversal
from reference.traversal import Traversal, traverse
from test_exactness import (
    ALL_MODELS,
    BIASED,
    CASES,
    EXACT,
    SOME_MODELS,
    WR,
    Case,
    grown,
    models,
    most_valuable,
    name_of,
    shape,
)

from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.papers.without_replacement import next_draw_chances
from dyntree_plugin.tree.registry import plan_growth

DRAWN = [case for case in CASES if plan_growth(*case[:2]).sampling == WR]
STATIC = (GrowthConfig("expansion", (2, 1), sampling=WR), shape(4, 2, 1, 2), 3)
ADAPTED = (GrowthConfig("dyspec"), shape(4, 3, 1, 3), 3)
CHAIN = (GrowthConfig("chain", sampling=WR), shape(3, 3, 1, 1), 3)
by_value = pytest.mark.parametrize("case", DRAWN, ids=map(name_of, DRAWN))
both = pytest.mark.parametrize("case", [STATIC, ADAPTED], ids=["static", "by value"])


def traversed(grown: Grown, target: Model, scheduled: int) -> Traversal:
    """Return the chances of traversal verification, of the first ``scheduled`` nodes."""
    tree, draws = grown.tree, grown.tree.draws
    if draws is None:
        raise ValueError("this tree does not say how its children were drawn")
    request = torch.arange(len(tree.counts))[:, None]
    p = target.after(grown.depths, grown.codes)
    counts = tree.counts.clamp(max=scheduled)
    return traverse(tree.tokens, tree.parents, counts, draws.log_probs[request, draws.columns], p)


def emitted_by_traversal(
    grown: Grown,
    target: Model,
    scheduled: int,
    break_it: Callable[[Traversal], Traversal] = lambda found: found,
) -> torch.Tensor:
    """Return the law of the first tokens under traversal verification, over draws and uniforms.

    ``break_it`` changes what is computed, for controls.
    """
    tree, found = grown.tree, break_it(traversed(grown, target, scheduled))
    request = torch.arange(len(tree.counts))
    law = torch.zeros_like(target.tails()[0])
    for weights, last in decisions(found, scheduled):
        path = found.path_to(last, int(tree.depths.max()))
        law += continued(
            grown.chances * weights, path, (path >= 0).sum(1), found.residual[request, last],
            tree.tokens, target,
        )  # fmt: skip
    return law


def decisions(found: Traversal, scheduled: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the chance [R] of each way to decide at the first nodes, and the last row accepted."""
    for outcome in itertools.product((False, True), repeat=scheduled):
        taken = torch.zeros(found.passes.shape, dtype=torch.bool)
        taken[:, 1 : 1 + len(outcome)] = torch.tensor(outcome)
        weights = torch.where(taken, found.passes, 1 - found.passes)[:, 1:].prod(1)
        # A uniform below 0 accepts at any chance; a uniform of 2 rejects. The root is accepted.
        uniforms = torch.where(taken, -1.0, 2.0).index_fill(1, torch.tensor([0]), -1.0)
        yield weights, found.accepted(uniforms)


def law_of(
    made: Grown, target: Model, break_it: Callable[[Traversal], Traversal] = lambda found: found
) -> torch.Tensor:
    return emitted_by_traversal(made, target, made.tree.tokens.shape[1], break_it)


@by_value
def test_every_drawn_tree_emits_the_targets_law(case: Case):
    """Static shapes, and shapes by value, where what one branch draws decides how far another
    grows."""
    for which in ALL_MODELS:
        made, target = grown(case, which)
        assert distance(law_of(made, target), target) < EXACT


@by_value
def test_the_first_nodes_of_a_tree_emit_it_too(case: Case):
    made, target = grown(case, 0)
    for scheduled in (1, made.tree.tokens.shape[1] - 1):
        assert distance(emitted_by_traversal(made, target, scheduled), target) < EXACT


def from_best_tokens(case: Case) -> Iterator[tuple[Grown, Model, Model]]:
    """Yield the trees of drafts of two tokens, the whole drafts, and the targets."""
    config, tree_shape, vocab = case
    for draft, target in models(vocab, tree_shape.max_depth):
        plan = plan_growth(config, tree_shape)
        yield grow_every_way(plan, of_best_tokens(draft, 2)), draft, target


@both
def test_trees_that_are_drawn_from_a_drafts_best_tokens_emit_it_too(case: Case):
    for made, _, target in from_best_tokens(case):
        assert distance(law_of(made, target), target) < EXACT


@both
def test_to_verify_them_by_the_whole_draft_is_biased(case: Case):
    far = 0.0
    for made, draft, target in from_best_tokens(case):
        whole = draft.after(made.depths, made.codes).log()
        claimed = replace(made, tree=drawn_as_listed(made.tree, whole))
        far = max(far, distance(law_of(claimed, target), target))
    assert far > BIASED


def biased(case: Case, break_it: Callable[[Traversal, Grown, Model], Traversal]) -> bool:
    """Return whether the law is far from the target's for some pair of models."""

    def far(made: Grown, target: Model) -> float:
        law = law_of(made, target, lambda found: break_it(found, made, target))
        return distance(law, target)

    return any(far(*grown(case, which)) > BIASED for which in ALL_MODELS)


@both
def test_a_token_of_the_target_in_place_of_the_residual_is_biased(case: Case):
    assert biased(
        case,
        lambda found, made, target: replace(found, residual=target.after(made.depths, made.codes)),
    )


@both
def test_to_accept_too_much_is_biased(case: Case):
    assert biased(case, lambda found, made, target: replace(found, passes=found.passes.sqrt()))


@both
def test_to_take_siblings_for_independent_draws_is_biased(
    case: Case, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        traversal,
        "next_draw_chances",
        lambda draft, unseen: next_draw_chances(draft, torch.ones_like(unseen)),
    )
    assert biased(case, lambda found, made, target: found)


def test_a_tree_that_is_cut_by_what_it_drew_is_biased():
    far = 0.0
    for which in SOME_MODELS:
        made, target = grown((GrowthConfig("dyspec"), shape(6, 2, 1, 3), 3), which)
        far = max(far, distance(law_of(most_valuable(made, 3), target), target))
    assert far > BIASED


@both
def test_nodes_are_on_the_accepted_path_as_often_as_is_said(case: Case):
    made, target = grown(case, 0)
    size = made.tree.tokens.shape[1]
    found = traversed(made, target, size)
    held = torch.zeros_like(found.on_path())
    for weights, last in decisions(found, size):
        path = found.path_to(last, int(made.tree.depths.max()))
        on_it = torch.nn.functional.one_hot(path + 1, size + 1).sum(1)[:, 1:]
        held += weights[:, None] * on_it
    assert (held - found.on_path()).abs().max() < EXACT


def test_a_chain_that_ends_by_the_tokens_before_its_next_one_emits_it_too():
    """Control: one that ends by the next one, which it then leaves out."""
    far = [0.0, 0.0]
    for which, looks_at in itertools.product(ALL_MODELS, (0, 1)):
        made, target = grown(CHAIN, which)
        counts = torch.where(made.tree.tokens[:, looks_at] == 0, 1, made.tree.counts)
        ended = replace(made, tree=replace(made.tree, counts=counts))
        far[looks_at] = max(far[looks_at], distance(law_of(ended, target), target))
    assert far[0] < EXACT
    assert far[1] > BIASED


def test_on_a_chain_it_is_block_verification():
    """Sun et al., arXiv 2403.10444, algorithm 2."""
    for which in (0, 1, 2):
        made, target = grown(CHAIN, which)
        assert made.tree.draws is not None
        q, p = made.tree.draws.log_probs.exp(), target.after(made.depths, made.codes)
        passes, ratio = [], torch.ones(len(q), 1, dtype=torch.float64)
        for at, token in enumerate(made.tree.tokens.split(1, dim=1)):
            ratio = (ratio * p[:, at].gather(1, token) / q[:, at].gather(1, token)).clamp(max=1)
            if at < 2:
                mass = (ratio * p[:, at + 1] - q[:, at + 1]).clamp(min=0).sum(1, keepdim=True)
                passes.append(mass / (mass + 1 - ratio))
        found = traversed(made, target, 3).passes[:, 1:]
        torch.testing.assert_close(found, torch.cat([*passes, ratio], dim=1))
