"""Check on every device that learning in one call learns what the tensor implementation learns."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from tree_shapes import random_tree

from dyntree_kernels.contracts import Learn, Regression
from dyntree_plugin.tree.value import AcceptanceEstimate, outcomes

SLOTS, DEPTH = 7, 5


def lesson(requests: int, nodes: int, g: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return the arguments of `Learn` for random trees. Features are NaN from the first node that
    was not verified."""
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
        features[slots[r], counts[r] :] = float("nan")
    classes = torch.randint(-1, 3, (requests,), generator=g)
    return features, parents, path, counts, slots, classes


class LearnChecks:
    """Tests of ``learn`` on ``device``. Its weights may differ by at most ``tolerance``."""

    learn: ClassVar[Learn]
    device: ClassVar[torch.device] = torch.device("cpu")
    tolerance: ClassVar[float]
    lessons: ClassVar[int] = 20

    def regression_of(self, estimate: AcceptanceEstimate) -> Regression:
        own = estimate.regression
        return Regression(*(each.clone().to(self.device) for each in own[:5]), *own[5:])

    def learn_from(self, regression: Regression, arrays: tuple[torch.Tensor, ...]) -> None:
        features, parents, path, counts, slots, classes = arrays
        # They are columns of one array, as in the engine.
        slots, classes = torch.stack([slots, classes], 1).to(self.device).unbind(1)
        of_trees = (each.to(self.device) for each in (features, parents, path, counts))
        self.learn(regression, *of_trees, slots, classes)

    def compare(
        self, requests: int, nodes: int, compiled: AcceptanceEstimate, tensors: AcceptanceEstimate
    ) -> Regression:
        """Raise if the two differ after they have seen the same lessons."""
        g = torch.Generator().manual_seed(requests)
        regression = self.regression_of(compiled)
        for _ in range(self.lessons):
            arrays = lesson(requests, nodes, g)
            features, parents, path, counts, slots, classes = arrays
            valid = torch.arange(nodes) < counts[:, None]
            judged, taken = outcomes(parents[slots], path, valid)
            tensors.observe(features[slots], judged, taken, classes)
            self.learn_from(regression, arrays)
            within = {"atol": self.tolerance, "rtol": self.tolerance}
            torch.testing.assert_close(regression.weights.cpu(), tensors.weights, **within)
            torch.testing.assert_close(regression.information.cpu(), tensors.information, **within)
        return regression

    @pytest.mark.parametrize(("requests", "nodes"), [(1, 1), (3, 16), (7, 65)])
    def test_it_learns_what_the_estimate_does(self, requests: int, nodes: int) -> None:
        start = AcceptanceEstimate("cpu").weights
        estimates = (AcceptanceEstimate("cpu", memory=50.0) for _ in range(2))
        learned = self.compare(requests, nodes, *estimates).weights.cpu()
        if nodes > 1:
            assert (learned[:3] - start[:3]).abs().amax(dim=1).min() > 0.01
        assert torch.equal(learned[3:], start[3:])

    @pytest.mark.parametrize("memory", [10.0, 1e9])
    def test_another_memory_would_be_told_apart(self, memory: float) -> None:
        """Control of the test above."""
        with pytest.raises(AssertionError):
            self.compare(
                3, 16, AcceptanceEstimate("cpu", memory=50.0), AcceptanceEstimate("cpu", memory)
            )

    def test_what_is_not_finite_makes_its_class_begin_anew(self) -> None:
        fresh, g = AcceptanceEstimate("cpu"), torch.Generator().manual_seed(0)
        regression = self.regression_of(fresh)
        for _ in range(9):
            self.learn_from(regression, lesson(7, 16, g))
        others = regression.weights[1:].cpu()
        features, parents, path, counts, slots, _ = lesson(1, 16, g)
        nothing, whole = torch.full_like(features, float("nan")), torch.full_like(counts, 16)
        self.learn_from(regression, (nothing, parents, path, whole, slots, torch.tensor([0])))
        assert torch.equal(regression.weights[0].cpu(), fresh.weights[0])
        torch.testing.assert_close(regression.information[0].cpu(), fresh.information[0])
        assert torch.equal(regression.weights[1:].cpu(), others)
        assert not torch.equal(others, fresh.weights[1:])

    def test_arrays_that_are_not_dense_are_refused(self) -> None:
        features, parents, *others = lesson(2, 4, torch.Generator().manual_seed(0))
        with pytest.raises(ValueError, match="dense"):
            self.learn_from(
                self.regression_of(AcceptanceEstimate("cpu")), (features, parents.t(), *others)
            )
