"""A compiled call picks the same children from the draft's logits as the picker on tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compiled_steps import CASE, VOCAB, Step

from dyntree_kernels.cpu.gumbel import perturbed_logits
from dyntree_plugin.tree.children import ChildPicker, Children, DraftRows
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class


def picked_by_tensors(
    step: Step, logits: torch.Tensor, positions: torch.Tensor, seeds: torch.Tensor
) -> Children:
    pick = ChildPicker(step.plan, perturbed_logits, step.estimate)
    per_request = len(logits) // step.requests
    classes = temperature_class(step.temperatures)
    of_rows = (step.temperatures, classes, seeds, step.chained)
    rows = DraftRows(
        *(each.repeat_interleave(per_request) for each in of_rows), positions, positions
    )
    return pick(logits, rows, all_greedy=False).by_request(step.requests)


def picks_differ(step: Step, seeds: torch.Tensor) -> None:
    """Raise unless the root's children and those of the next forward are the picker's."""
    positions = step.case.roots
    for width in (1, step.widths[0]):
        if width > 1:
            assert next(step.frontiers()) == (width, step.requests * width)
            positions = step.rows.positions[: step.requests * width]
        logits = step.logits(width)
        found, expected = step.pick(logits), picked_by_tensors(step, logits, positions, seeds)
        exists = expected.log_probs > float("-inf")
        assert torch.equal(found.tokens[exists], expected.tokens[exists])
        torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-5, rtol=1e-5)
        if found.features is not None:
            torch.testing.assert_close(found.features, expected.features, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("coupling", [True, False])
@pytest.mark.parametrize(
    ("dtype", "vocab"), [(torch.float32, 2500), (torch.bfloat16, 70), (torch.float16, 1030)]
)
def test_the_picks_are_the_pickers(
    dtype: torch.dtype, vocab: int, coupling: bool, calibrated: bool
) -> None:
    shape = replace(CASE.shape, node_budget=40, coupling=coupling)
    case = replace(CASE, shape=shape, calibrated=calibrated)
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
