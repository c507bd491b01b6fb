"""Learning in one launch learns what the tensors' estimate does; on a GPU or interpreted."""

from __future__ import annotations

import pytest
import torch
from paged_cases import DEVICE, random_tree

from dyntree_kernels.gpu.learn import Regression, learn
from dyntree_plugin.tree import value
from dyntree_plugin.tree.value import AcceptanceEstimate, outcomes

SLOTS, DEPTH = 7, 5


def lesson(requests: int, nodes: int, g: torch.Generator) -> tuple[torch.Tensor, ...]:
    parents = torch.tensor([random_tree(nodes + 1, g)[1:] for _ in range(SLOTS)]) - 1
    features = 3 * torch.randn(SLOTS, nodes, 2, generator=g)
    slots = torch.randperm(SLOTS, generator=g)[:requests]
    counts = torch.randint(nodes + 1, (requests,), generator=g)
    path = torch.full((requests, DEPTH), -1)
    for r in range(requests):
        at = -1
        for depth in range(int(torch.randint(DEPTH + 1, (), generator=g))):
            children = (parents[slots[r]] == at).nonzero()[:, 0]
            children = children[children < counts[r]]
            if not len(children):
                break
            at = int(children[torch.randint(len(children), (), generator=g)])
            path[r, depth] = at
    classes = torch.randint(-1, 3, (requests,), generator=g)
    return features, parents, path, counts, slots, classes


def regression_of(estimate: AcceptanceEstimate) -> Regression:
    own = (estimate.weights, estimate.information, estimate.prior, estimate.low, estimate.high)
    tensors = (each.clone().to(DEVICE) for each in own)
    return Regression(*tensors, value.PRIOR_STRENGTH, estimate.memory, value.NEWTON_STEPS)


@pytest.mark.parametrize(("requests", "nodes"), [(1, 1), (3, 16), (7, 65)])
def test_it_learns_what_the_estimate_does(requests: int, nodes: int) -> None:
    g = torch.Generator().manual_seed(requests)
    estimate = AcceptanceEstimate("cpu", memory=50.0)
    regression = regression_of(estimate)
    start = estimate.weights.clone()
    for _ in range(6):
        arrays = lesson(requests, nodes, g)
        features, parents, path, counts, slots, classes = arrays
        valid = torch.arange(nodes) < counts[:, None]
        judged, taken = outcomes(parents[slots], path, valid)
        estimate.observe(features[slots], judged, taken, classes)
        learn(regression, *(array.to(DEVICE) for array in arrays))
        for got, wanted in zip(
            regression[:2], (estimate.weights, estimate.information), strict=True
        ):
            torch.testing.assert_close(got.cpu(), wanted, atol=2e-3, rtol=2e-3)
    if nodes > 1:
        assert (estimate.weights[:3] - start[:3]).abs().amax(dim=1).min() > 0.01
    assert torch.equal(estimate.weights[3:], start[3:])


def test_what_is_not_finite_is_forgotten() -> None:
    estimate = AcceptanceEstimate("cpu")
    regression = regression_of(estimate)
    arrays = list(lesson(1, 16, torch.Generator().manual_seed(0)))
    arrays[0] = torch.full_like(arrays[0], float("nan"))
    arrays[3], arrays[5] = torch.tensor([16]), torch.tensor([1])
    learn(regression, *(array.to(DEVICE) for array in arrays))
    assert torch.equal(regression.weights.cpu(), estimate.weights)
    torch.testing.assert_close(regression.information.cpu(), estimate.information)


def test_arrays_that_are_not_dense_are_refused() -> None:
    regression = regression_of(AcceptanceEstimate("cpu"))
    arrays = [array.to(DEVICE) for array in lesson(2, 4, torch.Generator().manual_seed(0))]
    arrays[1] = arrays[1].t()
    with pytest.raises(ValueError, match="dense"):
        learn(regression, *arrays)
