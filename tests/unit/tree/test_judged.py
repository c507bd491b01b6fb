"""What is known of a trie's nodes: from the trie, from the target sampler's noise, and from the
draft, which is asked for them."""

from __future__ import annotations

import pytest
import torch
from reference.growths import Path
from tries import as_trie

from dyntree_kernels.contracts import BESIDE, BOTH, DRAFT, KINDS, LOOK_UP
from dyntree_kernels.cpu.gumbel import perturbed_logits
from dyntree_kernels.tries import Trie
from dyntree_plugin.tree.children import ChildPicker, Children, DraftRows
from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.judged import Asked, JudgedTrie
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.value import AcceptanceEstimate, features, logit_of, temperature_class

VOCAB, NAN = 9, float("nan")
EDGES: list[dict[Path, float]] = [
    {(1,): 0.5, (1, 2): 2.0, (4,): -30.0, (1, 2, 1): 30.0},
    {(3,): -1.0, (3, 3): 0.0},
    {(8,): 1.0},
]
TEMPERATURES = torch.tensor([0.7, 1.3, 0.0])
CLASSES = temperature_class(TEMPERATURES)
SEEDS, ROOTS = torch.tensor([5, -6, 7]), torch.tensor([10, 11, 300])


def tries() -> Trie:
    trie = as_trie(EDGES)
    return trie._replace(evidence=trie.evidence.float())


def estimate() -> AcceptanceEstimate:
    """Return an estimate whose classes and kinds have weights of their own."""
    made = AcceptanceEstimate("cpu")
    made.weights += torch.rand(made.weights.shape, generator=torch.Generator().manual_seed(0))
    return made


def picker(children: int = 2) -> ChildPicker:
    plan = TreePlan(TreeShape(9, 3, 2, children), GrowthConfig(), "match", calibration=True)
    return ChildPicker(plan, perturbed_logits, estimate())


# The target sampler's noise.


def assert_it_is_the_samplers(noise: torch.Tensor, seeds: torch.Tensor = SEEDS) -> None:
    """Raise unless the target's sampler adds ``noise`` [R, T] to the scores of the trie's tokens.

    The target draws a node's token in the row of the node's parent.
    """
    g = torch.Generator().manual_seed(0)
    for row, edges in enumerate(EDGES):
        temperature = TEMPERATURES[row : row + 1]
        scale = torch.where(temperature > 0, temperature, 1.0)
        for node, path in enumerate(edges):
            logits = torch.randn(1, VOCAB, generator=g)
            position = ROOTS[row : row + 1] + len(path) - 1
            drawn = perturbed_logits(logits, scale, seeds[row : row + 1], position)
            added = drawn[0, path[-1]] - logits[0, path[-1]] / scale
            expected = torch.where(temperature > 0, added, 0.0)[0]
            torch.testing.assert_close(noise[row, node], expected, atol=1e-5, rtol=0)


def test_the_noise_of_a_node_is_what_the_targets_sampler_adds_there() -> None:
    pick = picker()
    assert_it_is_the_samplers(pick.trie_noise(tries(), ROOTS, SEEDS, TEMPERATURES, VOCAB))


@pytest.mark.parametrize(("root", "seed"), [(1, 0), (-1, 0), (0, 1)])
def test_noise_of_another_place_or_seed_is_told_apart(root: int, seed: int) -> None:
    """Control of the test above."""
    found = picker().trie_noise(tries(), ROOTS + root, SEEDS + seed, TEMPERATURES, VOCAB)
    with pytest.raises(AssertionError):
        assert_it_is_the_samplers(found)


# Features, kinds and chances.


def judged_trie() -> tuple[JudgedTrie, torch.Tensor]:
    noise = torch.randn(tries().tokens.shape, generator=torch.Generator().manual_seed(1))
    return picker().judged(tries(), noise, CLASSES), noise


def chance(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(
        weights[..., 0] + weights[..., 1] * x[..., 0] + weights[..., 2] * x[..., 1]
    )


def test_a_node_that_the_draft_has_not_judged_has_the_evidence_and_the_noise() -> None:
    trie, noise = judged_trie()
    bounded = tries().evidence.clamp(-20, 20)
    assert torch.equal(trie.features, torch.stack([bounded, noise], dim=-1))
    assert (trie.kinds == LOOK_UP).all()
    weights = estimate().weights[CLASSES * KINDS + LOOK_UP][:, None]
    torch.testing.assert_close(trie.log_chances.exp(), chance(weights, trie.features))


def answer(asked: list[list[float]], beside: list[list[bool]] | None = None) -> Children:
    """Return what a draft says in one row per request, or in the rows of ``beside`` [R, W]."""
    rows = torch.tensor([[True]] * 3 if beside is None else beside)
    tokens = torch.zeros(*rows.shape, 2, dtype=torch.int64)
    return Children(tokens, tokens.float(), asked=torch.tensor(asked), beside=rows)


def test_a_node_that_the_draft_has_judged_has_the_drafts_logit_and_the_evidence() -> None:
    trie, noise = judged_trie()
    first = torch.tensor([[-0.1, NAN, -9.0, *[NAN] * 4], [-2.0, *[NAN] * 6], [NAN] * 7])
    told = trie.judge(answer(first.tolist()))
    later = torch.full_like(first, NAN)
    later[0, 1] = -0.7
    trie.judge(answer(later.tolist()))
    known = torch.where(first.isnan(), later, first)
    both = ~known.isnan()
    assert torch.equal(trie.kinds == BOTH, both)
    assert torch.equal(trie.kinds == LOOK_UP, ~both)
    evidence = tries().evidence.clamp(-20, 20)
    assert torch.equal(trie.features[both], torch.stack([logit_of(known), evidence], -1)[both])
    assert torch.equal(trie.features[~both], torch.stack([evidence, noise], -1)[~both])
    weights = estimate().weights[CLASSES[:, None] * KINDS + trie.kinds]
    torch.testing.assert_close(trie.log_chances.exp(), chance(weights, trie.features))
    # Each answer is about the nodes that it tells of.
    assert torch.equal(told.isnan(), first.isnan())
    assert torch.equal(told[~first.isnan()], trie.log_chances[~first.isnan()])


def test_a_row_without_a_distribution_judges_nothing() -> None:
    pick = picker()
    before, _ = judged_trie()
    after, _ = judged_trie()
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[0, 5], logits[1], logits[2, 0] = NAN, float("-inf"), float("inf")
    found = pick(logits, rows_at(ROOTS), False, asked_at_the_root()).by_request(3)
    assert after.judge(found).isnan().all()
    assert torch.equal(after.features, before.features)
    assert torch.equal(after.kinds, before.kinds)
    assert torch.equal(after.log_chances, before.log_chances)


def test_candidates_of_the_draft_are_beside_the_tries_where_it_was_asked() -> None:
    trie, _ = judged_trie()
    nothing = [[NAN] * 7] * 3
    trie.judge(answer(nothing, [[True], [False], [True]]))
    trie.judge(answer(nothing, [[False, True], [True, True], [False, False]]))
    drafted = trie.candidate_kinds[:, 7:]
    assert torch.equal(trie.candidate_kinds[:, :7], trie.kinds)
    is_beside = [[1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]]
    assert torch.equal(drafted, torch.where(torch.tensor(is_beside) > 0, BESIDE, DRAFT))


# Tokens that the draft is asked for.


def rows_at(positions: torch.Tensor) -> DraftRows:
    chained = torch.zeros(3, dtype=torch.bool)
    return DraftRows(TEMPERATURES, CLASSES, SEEDS, chained, positions, torch.zeros_like(positions))


def asked_at_the_root() -> Asked:
    """Return the nodes below the root; row r of the logits is that of request r."""
    trie = tries()
    own = torch.arange(3)[:, None].expand_as(trie.above)
    return Asked(torch.where(trie.exists & (trie.above < 0), own, -1), trie.tokens)


def test_the_draft_tells_of_tokens_outside_its_best() -> None:
    pick = picker(children=1)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    asked = asked_at_the_root()
    found = pick(logits, rows_at(ROOTS), False, asked)
    log_probs = perturbed_logits(logits, TEMPERATURES, SEEDS, ROOTS).log_softmax(dim=1)
    assert found.asked is not None
    real = asked.rows >= 0
    torch.testing.assert_close(found.asked[real], log_probs.gather(1, asked.tokens)[real])
    assert found.asked[~real].isnan().all()
    assert not (asked.tokens == found.tokens)[real].all()


def test_children_beside_a_trie_have_chances_of_their_own_kind() -> None:
    pick, logits = picker(), torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    asked = asked_at_the_root()
    asked = asked._replace(rows=asked.rows.masked_fill(torch.arange(3)[:, None] == 1, -1))
    found = pick(logits, rows_at(ROOTS), False, asked)
    assert found.beside is not None
    assert found.beside.tolist() == [True, False, True]
    scores = perturbed_logits(logits, TEMPERATURES, SEEDS, ROOTS).log_softmax(dim=1)
    x = features(scores.topk(2, dim=1).values)
    kinds = torch.tensor([BESIDE, DRAFT, BESIDE])
    expected = chance(estimate().weights[CLASSES * KINDS + kinds][:, None], x)
    torch.testing.assert_close(found.log_probs.exp(), expected)
