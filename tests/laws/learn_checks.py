"""Check on every device that learning in one call learns what the tensor implementation learns."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from reference.learning import LearningEstimate, outcomes
from tree_shapes import random_tree

from dyntree_kernels.contracts import KINDS, LOOK_UP
from dyntree_kernels.learning import Learn, Regression

SLOTS, DEPTH = 7, 5


def lesson(requests: int, nodes: int, g: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Return the arguments of `Learn` for random trees. Features are NaN from the first node that
    was not verified."""
    parents = torch.tensor([random_tree(nodes + 1, g)[1:] for _ in range(SLOTS)]) - 1
    features = 3 * torch.randn(SLOTS, nodes, 2, generator=g)
    kinds = torch.randint(KINDS, (SLOTS, nodes), generator=g, dtype=torch.int8)
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
    return features, kinds, parents, path, counts, slots, classes


class LearnChecks:
    """Tests of ``learn`` on ``device``. Its weights may differ by at most ``tolerance``."""

    learn: ClassVar[Learn]
    device: ClassVar[torch.device] = torch.device("cpu")
    tolerance: ClassVar[float]
    lessons: ClassVar[int] = 20

    def regression_of(self, estimate: LearningEstimate) -> Regression:
        own = estimate.regression
        return Regression(*(each.clone().to(self.device) for each in own[:5]), *own[5:])

    def learn_from(self, regression: Regression, arrays: tuple[torch.Tensor, ...]) -> None:
        *of_trees, slots, classes = arrays
        # They are columns of one array, as in the engine.
        slots, classes = torch.stack([slots, classes], 1).to(self.device).unbind(1)
        self.learn(regression, *(each.to(self.device) for each in of_trees), slots, classes)

    def compare(
        self, requests: int, nodes: int, compiled: LearningEstimate, tensors: LearningEstimate
    ) -> Regression:
        """Raise if the two differ after they have seen the same lessons."""
        g = torch.Generator().manual_seed(requests)
        regression = self.regression_of(compiled)
        for _ in range(self.lessons):
            arrays = lesson(requests, nodes, g)
            features, kinds, parents, path, counts, slots, classes = arrays
            valid = torch.arange(nodes) < counts[:, None]
            judged, taken = outcomes(parents[slots], path, valid)
            tensors.observe(features[slots], kinds[slots], judged, taken, classes)
            self.learn_from(regression, arrays)
            within = {"atol": self.tolerance, "rtol": self.tolerance}
            torch.testing.assert_close(regression.weights.cpu(), tensors.weights, **within)
            torch.testing.assert_close(regression.information.cpu(), tensors.information, **within)
        return regression

    @pytest.mark.parametrize(("requests", "nodes"), [(1, 1), (3, 16), (7, 65)])
    def test_it_learns_what_the_estimate_does(self, requests: int, nodes: int) -> None:
        start = LearningEstimate("cpu").weights
        estimates = (LearningEstimate("cpu", memory=50.0) for _ in range(2))
        learned = self.compare(requests, nodes, *estimates).weights.cpu()
        if nodes > 1:
            moved = (learned[: 3 * KINDS] - start[: 3 * KINDS]).abs().amax(dim=1) > 0.01
            assert int(moved.sum()) > KINDS
        assert torch.equal(learned[3 * KINDS :], start[3 * KINDS :])

    @pytest.mark.parametrize("memory", [10.0, 1e9])
    def test_another_memory_would_be_told_apart(self, memory: float) -> None:
        """Control of the test above."""
        with pytest.raises(AssertionError):
            self.compare(
                3, 16, LearningEstimate("cpu", memory=50.0), LearningEstimate("cpu", memory)
            )

    def of_look_up(self, arrays: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return what one lesson teaches of candidates of kind `LOOK_UP`."""
        regression = self.regression_of(LearningEstimate("cpu"))
        self.learn_from(regression, arrays)
        parts = (regression.weights, regression.information.flatten(1))
        return torch.cat(parts, dim=1)[LOOK_UP::KINDS].cpu()

    def test_kinds_learn_apart(self) -> None:
        # Every class has judged nodes of the kind, and of the kind that takes its place.
        features, kinds, *others = lesson(7, 64, torch.Generator().manual_seed(0))
        learned = self.of_look_up((features, kinds, *others))
        foreign = features.masked_fill((kinds != LOOK_UP)[:, :, None], float("nan"))
        assert torch.equal(self.of_look_up((foreign, kinds, *others)), learned)
        swapped = self.of_look_up((features, (kinds + 1) % KINDS, *others))
        assert (swapped - learned).abs().amax(dim=1)[:3].min() > 0.01

    def test_a_kind_without_nodes_fades_to_its_prior(self) -> None:
        prior = LearningEstimate("cpu", memory=8.0)
        regression, g = self.regression_of(prior), torch.Generator().manual_seed(0)
        regression.weights[LOOK_UP::KINDS] = torch.tensor([-5.0, 0.0, 0.0]).to(self.device)
        for _ in range(15):
            features, kinds, *others, _ = lesson(7, 16, g)
            of_draft, classes = torch.zeros_like(kinds), torch.zeros(7, dtype=torch.int64)
            self.learn_from(regression, (features, of_draft, *others, classes))
        weights = regression.weights.cpu()
        torch.testing.assert_close(weights[LOOK_UP], prior.weights[LOOK_UP], atol=0.01, rtol=0)
        assert (weights[0] - prior.weights[0]).abs().max() > 0.1
        assert (weights[LOOK_UP + KINDS :: KINDS, 0] == -5).all()

    def test_what_is_not_finite_makes_its_regression_begin_anew(self) -> None:
        fresh, g = LearningEstimate("cpu"), torch.Generator().manual_seed(0)
        regression = self.regression_of(fresh)
        for _ in range(9):
            self.learn_from(regression, lesson(7, 16, g))
        learned = regression.weights.cpu().clone()
        features, kinds, parents, path, counts, slots, _ = lesson(1, 16, g)
        nothing, whole = torch.full_like(features, float("nan")), torch.full_like(counts, 16)
        of_one, greedy = torch.full_like(kinds, LOOK_UP), torch.tensor([0])
        self.learn_from(regression, (nothing, of_one, parents, path, whole, slots, greedy))
        assert torch.equal(regression.weights[LOOK_UP].cpu(), fresh.weights[LOOK_UP])
        torch.testing.assert_close(
            regression.information[LOOK_UP].cpu(), fresh.information[LOOK_UP]
        )
        assert torch.equal(regression.weights[KINDS:].cpu(), learned[KINDS:])
        assert regression.weights.isfinite().all()
        assert not torch.equal(learned[LOOK_UP], fresh.weights[LOOK_UP])

    def test_arrays_that_are_not_dense_are_refused(self) -> None:
        arrays = lesson(2, 4, torch.Generator().manual_seed(0))
        regression = self.regression_of(LearningEstimate("cpu"))
        for at in (1, 2):  # kinds, parents
            with pytest.raises(ValueError, match="dense"):
                self.learn_from(regression, (*arrays[:at], arrays[at].t(), *arrays[at + 1 :]))
