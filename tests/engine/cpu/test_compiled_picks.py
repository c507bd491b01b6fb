"""A compiled call picks the same children from the draft's logits as the picker on tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compiled_steps import CASE, VOCAB, Step, tensor_growth

from dyntree_kernels.contracts import BOTH
from dyntree_kernels.cpu.gumbel import perturbed_logits
from dyntree_kernels.tries import Trie
from dyntree_plugin.tree.children import ChildPicker, Children, DraftRows
from dyntree_plugin.tree.growth.topk import TopKGrowth
from dyntree_plugin.tree.judged import Asked, JudgedTrie
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class


class Tensors:
    """The picker on tensors, its growth, and the trie that it judges."""

    def __init__(self, step: Step, seeds: torch.Tensor) -> None:
        self.step, self.seeds = step, seeds
        self.pick = ChildPicker(step.plan, perturbed_logits, step.estimate)
        self.growth = tensor_growth(step.case)
        self.classes = temperature_class(step.temperatures)
        self.judged: JudgedTrie | None = None
        if step.trie is not None:
            assert isinstance(self.growth, TopKGrowth)
            trie = step.trie._replace(exists=step.trie.exists & ~step.chained[:, None])
            noise = self.pick.trie_noise(
                trie, step.case.roots, seeds, step.temperatures, step.vocab
            )
            self.judged = self.pick.judged(trie, noise, self.classes)
            self.growth.graft(trie, self.judged.log_chances)

    def same_judgement(self) -> None:
        """Raise unless compiled growth says the same of the trie's nodes."""
        if self.judged is None:
            return
        close = {"atol": 1e-4, "rtol": 1e-4}
        grafts, known = self.step.growth._grafts, self.growth._pool.grafts
        real = self.judged.trie.exists & (known.depths <= self.step.plan.shape.max_depth)
        kinds = torch.from_numpy(grafts.kinds[: self.step.requests])
        assert torch.equal(kinds[real], self.judged.kinds[real])
        features, edges = self.step.features_of_grafts(), self.step.edges_of_grafts
        assert edges[~real].isneginf().all()
        torch.testing.assert_close(edges[real], self.judged.log_chances[real], **close)
        if self.step.plan.calibrated:
            torch.testing.assert_close(features[real], self.judged.features[real], **close)

    def picked(self, logits: torch.Tensor, positions: torch.Tensor) -> Children:
        """Return the children of the last frontier's nodes, and judge the trie's."""
        step = self.step
        per_request = len(logits) // step.requests
        of_rows = (step.temperatures, self.classes, self.seeds, step.chained)
        rows = DraftRows(
            *(each.repeat_interleave(per_request) for each in of_rows), positions, positions
        )
        asked = None
        if self.judged is not None:
            assert isinstance(self.growth, TopKGrowth)
            which = self.growth.asked()
            assert which is not None
            first = torch.arange(step.requests)[:, None] * per_request
            asked = Asked(torch.where(which < 0, -1, first + which), self.judged.trie.tokens)
        return self.pick(logits, rows, False, asked).by_request(step.requests)

    def judge(self, found: Children, picked: Children) -> Children:
        """Judge the trie by what was ``found``, and grow by what compiled growth has picked.

        Return the children without those that the trie has.
        """
        if self.judged is None:
            self.growth.add(*picked[:3])
            return found
        assert isinstance(self.growth, TopKGrowth)
        judged = self.judged.judge(found)
        which = self.growth.asked()
        assert which is not None
        self.growth.add(picked.tokens, picked.log_probs, judged=judged)
        own = which[:, None] == torch.arange(found.tokens.shape[1])[:, None]
        same = own[:, :, None] & (found.tokens[..., None] == self.judged.trie.tokens[:, None, None])
        return found._replace(log_probs=found.log_probs.masked_fill(same.any(dim=3), float("-inf")))


def picks_differ(step: Step, seeds: torch.Tensor) -> None:
    """Raise unless the root's children and those of the next forward are the picker's."""
    tensors = Tensors(step, seeds)
    tensors.same_judgement()
    positions = step.case.roots
    for width in (1, step.widths[0]):
        if width > 1:
            assert next(step.frontiers()) == (width, step.requests * width)
            tensors.growth.frontier()
            positions = step.rows.positions[: step.requests * width]
        logits = step.logits(width)
        found, expected = step.pick(logits), tensors.picked(logits, positions)
        expected = tensors.judge(expected, found)
        tensors.same_judgement()
        exists = expected.log_probs > float("-inf")
        assert torch.equal(found.tokens[exists], expected.tokens[exists])
        torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-5, rtol=1e-5)
        if found.features is not None:
            torch.testing.assert_close(found.features, expected.features, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("coupling", [True, False])
@pytest.mark.parametrize("grafts", [0, 20])
@pytest.mark.parametrize(
    ("dtype", "vocab"), [(torch.float32, 2500), (torch.bfloat16, 70), (torch.float16, 1030)]
)
def test_the_picks_are_the_pickers(
    dtype: torch.dtype, vocab: int, coupling: bool, calibrated: bool, grafts: int
) -> None:
    shape = replace(CASE.shape, node_budget=40, coupling=coupling)
    case = replace(CASE, shape=shape, calibrated=calibrated, grafts=grafts)
    step = Step(case, dtype, vocab)
    picks_differ(step, step.seeds)
    if coupling:
        # Control: the noise depends on the request's own seed.
        with pytest.raises(AssertionError):
            picks_differ(Step(case, dtype, vocab), step.seeds + 1)


def test_the_learned_chance_is_the_estimates_of_the_moment() -> None:
    step = Step(CASE)
    step.estimate.weights[:, 0] -= 1
    picks_differ(step, step.seeds)
    control = Step(CASE)
    control.estimate = AcceptanceEstimate("cpu")
    with pytest.raises(AssertionError):
        picks_differ(control, control.seeds)


def test_a_chained_request_has_one_child_per_node() -> None:
    step = Step(replace(CASE, chained=(True, False)))
    edges = step.pick(step.logits(1)).log_probs
    assert edges.isfinite().sum(dim=2).tolist() == [[1], [4]]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_a_distribution_has_no_children(broken: float) -> None:
    """The row is of one request. The other request's tree does not change."""
    trees = []
    for first_row in (broken, 0.0):
        step = Step(CASE)
        logits = step.logits(1)
        logits[0, slice(None) if broken < 0 else 7] += first_row
        step.pick(logits)
        for width, _ in step.frontiers():
            step.pick(step.logits(width))
        trees.append(step.tree(step.finish()))
        trees[-1].check()
    assert [tree.counts.tolist() for tree in trees] == [[0, 12], [12, 12]]
    assert torch.equal(trees[0].tokens[1], trees[1].tokens[1])


def test_equal_scores_go_to_the_lowest_tokens_and_make_a_tree() -> None:
    step = Step(replace(CASE, temperatures=(0.0, 0.0)))
    picked = step.pick(torch.zeros(2, VOCAB))
    assert picked.tokens.tolist() == [[[0, 1, 2, 3]]] * 2
    for width, _ in step.frontiers():
        step.pick(torch.zeros(2 * width, VOCAB))
    step.tree(step.finish()).check()


def test_logits_of_another_number_of_rows_are_refused() -> None:
    step = Step(CASE)
    with pytest.raises(ValueError, match="logits of 3 rows"):
        step.growth.pick(torch.zeros(3, VOCAB))


def test_a_token_beyond_the_drafts_vocabulary_is_judged_unlikely() -> None:
    """A target may have more tokens than its draft."""
    step = Step(replace(CASE, grafts=2))
    assert step.trie is not None
    tokens = torch.tensor([[VOCAB + 1000, 3]] * 2)
    root = torch.full_like(tokens, -1)
    step.growth.graft(Trie(tokens, root, torch.zeros(2, 2), torch.ones(2, 2).bool()))
    step.pick(step.logits(1))
    kinds = step.growth._grafts.kinds[:2]
    assert (kinds == BOTH).all()
    features = step.features_of_grafts()
    assert (features[:, 0, 0] == -20).all()
    assert (features[:, 1, 0] > -20).all()
