"""The compiled observation is that of the tensors."""

from __future__ import annotations

import pytest
import torch

from dyntree_plugin.engine.cpu.estimate import CompiledEstimate
from dyntree_plugin.tree.value import CLASSES, AcceptanceEstimate

REQUESTS, NODES = 5, 7
Seen = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def seen(seed: int) -> Seen:
    """Some requests have no judged nodes, and one is of no class."""
    generator = torch.Generator().manual_seed(seed)
    features = 2 * torch.randn(REQUESTS, NODES, 2, generator=generator)
    judged = torch.rand(REQUESTS, NODES, generator=generator) < 0.6
    judged[seed % REQUESTS] = False
    features[~judged] = float("nan")
    taken = torch.rand(REQUESTS, NODES, generator=generator) < features.sum(dim=2).sigmoid()
    classes = torch.randint(-1, CLASSES, (REQUESTS,), generator=generator)
    return features, judged, taken, classes


def compare(compiled: AcceptanceEstimate, tensors: AcceptanceEstimate, steps: int = 60) -> None:
    """Raise where the two differ after having seen the same."""
    for step in range(steps):
        for estimate in (compiled, tensors):
            estimate.observe(*seen(step))
        torch.testing.assert_close(compiled.weights, tensors.weights, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(compiled.information, tensors.information, atol=1e-3, rtol=1e-3)


def test_it_learns_what_the_tensors_learn() -> None:
    compiled = CompiledEstimate("cpu")
    compare(compiled, AcceptanceEstimate("cpu"))
    assert not torch.equal(compiled.weights, AcceptanceEstimate("cpu").weights)


@pytest.mark.parametrize("memory", [100.0, 1e9])
def test_another_memory_would_be_told_apart(memory: float) -> None:
    """The control of the test above."""
    with pytest.raises(AssertionError):
        compare(CompiledEstimate("cpu"), AcceptanceEstimate("cpu", memory=memory))


def test_what_is_not_a_number_makes_its_class_begin_anew() -> None:
    learned, fresh = CompiledEstimate("cpu"), CompiledEstimate("cpu")
    for step in range(20):
        learned.observe(*seen(step))
    features, judged, taken, _ = seen(0)
    judged[1, 0], features[1, 0] = True, float("nan")
    others = learned.weights[1:].clone()
    learned.observe(features, judged, taken, torch.tensor([-1, 0, -1, -1, -1]))
    assert torch.equal(learned.weights[0], fresh.weights[0])
    assert torch.equal(learned.information[0], fresh.information[0])
    assert torch.equal(learned.weights[1:], others)
