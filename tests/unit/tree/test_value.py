"""The estimate of acceptance, learned from a simulated target with known chances."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.learning import LearningEstimate

from dyntree_kernels.contracts import DRAFT, KINDS, LOOK_UP
from dyntree_plugin.tree.value import CLASSES, FEATURES, features, temperature_class

VOCAB, KEPT, REQUESTS = 64, 4, 16
HOT = 4


@dataclass(frozen=True)
class Judged:
    """Children of judged nodes, with their true chances."""

    features: torch.Tensor
    taken: torch.Tensor
    chance: torch.Tensor

    @property
    def all(self) -> torch.Tensor:
        return torch.ones_like(self.taken)


def judge(beta: float, seed: int, parents: int = 8) -> Judged:
    """Return children of ``parents`` nodes of each request, [R, parents * KEPT], and which are
    taken.

    The target's scores are the draft's plus Gumbel noise of scale ``beta``. The chance of a child
    is then exactly softmax(scores / beta).
    """
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(REQUESTS, parents, VOCAB, generator=generator) * 2
    best = scores.topk(KEPT, dim=-1)
    log_probs = best.values - scores.logsumexp(dim=-1, keepdim=True)
    uniform = torch.rand(scores.shape, generator=generator).clamp(1e-9, 1 - 1e-7)
    drawn = (scores - beta * torch.log(-torch.log(uniform))).argmax(dim=-1)
    chance = (scores / beta).softmax(dim=-1).gather(2, best.indices)
    return Judged(
        features(log_probs).flatten(1, 2),
        (best.indices == drawn[:, :, None]).flatten(1),
        chance.flatten(1),
    )


def classes_of(temperature_class: int) -> torch.Tensor:
    return torch.full((REQUESTS,), temperature_class)


def learn(
    estimate: LearningEstimate, beta: float, steps: int, of: int = 0, seed: int = 0
) -> LearningEstimate:
    for step in range(steps):
        seen = judge(beta, seed + step)
        estimate.observe(seen.features, DRAFT, seen.all, seen.taken, classes_of(of))
    return estimate


def calibration_error(estimate: LearningEstimate, beta: float, of: int = 0) -> float:
    """Return the expected calibration error against the true chances, with 15 bins of equal
    width."""
    seen = judge(beta, seed=10_000, parents=200)
    stated = estimate.log_chance(seen.features, classes_of(of)).exp().flatten()
    truth = seen.chance.flatten()
    bins = (stated * 15).long().clamp(max=14)
    gaps = [(stated[bins == b] - truth[bins == b]).sum().abs() for b in bins.unique().tolist()]
    return float(sum(gaps)) / len(stated)


@pytest.mark.parametrize("beta", [0.3, 1.5])
def test_it_becomes_calibrated_whatever_the_noise_between_draft_and_target(beta: float):
    estimate = learn(LearningEstimate("cpu"), beta, steps=60)
    assert calibration_error(estimate, beta) < 0.025


@pytest.mark.parametrize("beta", [0.3, 1.5])
def test_what_it_has_not_observed_it_does_not_know(beta: float):
    """Control: without observations, the draft's probability stays, and stays wrong."""
    assert calibration_error(LearningEstimate("cpu"), beta) > 0.05


def test_it_starts_as_the_draft_probability():
    log_probs = torch.randn(3, 5, VOCAB).log_softmax(dim=-1).topk(KEPT, dim=-1).values
    stated = LearningEstimate("cpu").log_chance(features(log_probs), torch.tensor([0, 1, 5]))
    torch.testing.assert_close(stated, log_probs, atol=1e-4, rtol=1e-4)


def test_it_follows_a_workload_that_changes():
    estimate = learn(LearningEstimate("cpu", memory=2048.0), 0.3, steps=60)
    surprised = calibration_error(estimate, 1.5)
    learn(estimate, 1.5, steps=60, seed=500)
    assert calibration_error(estimate, 1.5) < 0.03 < 0.15 < surprised


def test_what_it_forgets_it_forgets_at_the_same_addresses():
    new, estimate = LearningEstimate("cpu").regression, LearningEstimate("cpu")
    kept = learn(estimate, 3.0, 20).regression
    assert not torch.equal(kept.weights, new.weights)
    estimate.forget()
    assert all(map(torch.equal, kept[:2], new[:2]))


def test_temperatures_learn_apart():
    estimate = LearningEstimate("cpu")
    for step in range(60):
        cold, hot = judge(0.3, step), judge(1.5, step + 500)
        pairs = zip(vars(cold).values(), vars(hot).values(), strict=True)
        x, taken, _ = (torch.cat(pair) for pair in pairs)
        of = torch.cat([classes_of(0), classes_of(HOT)])
        estimate.observe(x, DRAFT, torch.ones_like(taken), taken, of)
    assert calibration_error(estimate, 0.3, of=0) < 0.025
    assert calibration_error(estimate, 1.5, of=HOT) < 0.025
    assert calibration_error(estimate, 1.5, of=0) > 0.1


def test_a_temperature_has_one_class_and_only_greedy_has_the_first():
    of = temperature_class(torch.tensor([0.0, 1e-6, 0.24, 0.25, 0.6, 0.99, 1.0, 1.9]))
    assert of.tolist() == [0, 1, 1, 2, 3, 4, 5, 5]
    assert int(of.max()) < CLASSES


def test_a_batch_teaches_what_its_requests_teach_together():
    """The requests of one step are one observation, whatever their order."""
    seen = judge(0.5, seed=1)
    forward, backward = LearningEstimate("cpu"), LearningEstimate("cpu")
    forward.observe(seen.features, DRAFT, seen.all, seen.taken, classes_of(0))
    turned = seen.features.flip(0), DRAFT, seen.all, seen.taken.flip(0)
    backward.observe(*turned, classes_of(0))
    torch.testing.assert_close(forward.weights, backward.weights)
    again = LearningEstimate("cpu")
    again.observe(seen.features, DRAFT, seen.all, seen.taken, classes_of(0))
    assert torch.equal(forward.weights, again.weights), (
        "the ranks of an engine must agree bit by bit"
    )


def test_a_candidate_is_worth_what_its_kind_has_learned():
    estimate = LearningEstimate("cpu")
    estimate.weights += torch.linspace(0, 1, CLASSES * KINDS)[:, None]
    x, of = torch.randn(3, 5, KEPT, FEATURES), torch.tensor([0, 5, 2])
    kinds = torch.randint(KINDS, (3, 5, KEPT), dtype=torch.int8)
    stated = estimate.log_chance(x, of, kinds)
    for kind in range(KINDS):
        alone, here = estimate.log_chance(x, of, kind), kinds == kind
        assert torch.equal(stated[here], alone[here])
        assert not torch.isclose(stated, alone)[~here].any()
    by_node = estimate.log_chance(x, of, kinds[:, :, :1])
    assert torch.equal(by_node, estimate.log_chance(x, of, kinds[:, :, :1].expand_as(kinds)))


class Unexplored(LearningEstimate):
    """Learns nothing of a kind that has no judged node: no request counts for it."""

    def _observe(self, kind, features, judged, taken, classes):
        if judged.any():
            super()._observe(kind, features, judged, taken, classes)


@pytest.mark.parametrize("kind_of_estimate", [LearningEstimate, Unexplored])
def test_a_kind_that_trees_leave_out_gets_another_try(kind_of_estimate: type[LearningEstimate]):
    """An estimate may fall so low that growth keeps no node of the kind. Without the count of
    requests it stays there, as the control shows."""
    estimate = kind_of_estimate("cpu", memory=256.0)
    estimate.weights[LOOK_UP] = torch.tensor([-5.0, 0.0, 0.0])
    learn(estimate, 0.3, steps=120)
    assert calibration_error(estimate, 0.3) < 0.05
    weights = estimate.weights[LOOK_UP]
    if kind_of_estimate is Unexplored:
        assert weights.tolist() == [-5.0, 0.0, 0.0]
    else:
        torch.testing.assert_close(weights, estimate.prior[LOOK_UP], atol=0.01, rtol=0)


numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=80, deadline=None)
@given(st.lists(numbers, min_size=3, max_size=3), st.integers(0, 2**30), st.booleans())
def test_no_state_and_no_score_makes_a_value_that_is_no_chance(
    weights: list[float], seed: int, always: bool
):
    """Values are finite and at most 0 for any weights and scores, and right again after one
    step."""
    generator = torch.Generator().manual_seed(seed)
    estimate = LearningEstimate("cpu")
    estimate.weights[:] = torch.tensor(weights)
    log_probs = torch.randn(2, 3, VOCAB, generator=generator).log_softmax(-1).topk(KEPT).values
    log_probs[0, 0, 1:] = float("-inf")
    log_probs[0, 1] = float("nan")
    log_probs[1, 0, 0] = 0.0
    x, of = features(log_probs), torch.tensor([0, 3])
    kinds = torch.randint(KINDS, x.shape[:-1], generator=generator)
    assert x.isfinite().all()
    taken = torch.full((2, 12), always)
    estimate.observe(x.flatten(1, 2), kinds.flatten(1), torch.ones_like(taken), taken, of)
    assert estimate.weights.view(CLASSES, KINDS, -1)[of].isfinite().all()
    assert estimate.information.isfinite().all()
    stated = estimate.log_chance(x, of, kinds)
    assert stated.isfinite().all()
    assert (stated <= 0).all()
