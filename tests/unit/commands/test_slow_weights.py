"""The virtual link delivers layers when vLLM's prefetching would have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.serve.slow_weights import (
    LinkedWeights,
    VirtualLink,
)


class Time:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Layer(nn.Module):
    """1000 bytes of weights, and a forward that takes a known time."""

    def __init__(self, time: Time, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(250))
        self._time, self._seconds = time, seconds

    def forward(self, hidden: torch.Tensor, *, scale: int) -> torch.Tensor:
        self._time.now += self._seconds
        return hidden * scale


class Model:
    """Layers that come over a link of 1000 bytes per second."""

    def __init__(self, layers: int, slots: int, computing: float) -> None:
        self.time = Time()
        offloader = LinkedWeights(VirtualLink(1000, self.time, self.time.sleep), slots)
        generated: Any = (Layer(self.time, computing) for _ in range(layers))
        self.layers = offloader.wrap_modules(generated)
        offloader.post_init()

    def step(self, drafting: float = 0.0) -> float:
        """Return the seconds of a forward and of what the engine does after it."""
        began = self.time.now
        hidden = torch.ones(2)
        for layer in self.layers:
            hidden = layer(hidden, scale=2)
        assert hidden.tolist() == [2.0 ** len(self.layers)] * 2
        self.time.now += drafting
        return self.time.now - began


def test_a_step_with_room_for_one_layer_takes_its_transfers_and_its_arithmetic() -> None:
    """A layer's transfer cannot begin before the one in its slot has run."""
    model = Model(layers=4, slots=1, computing=0.25)
    assert [model.step() for _ in range(3)] == pytest.approx([5.0, 5.0, 5.0])


@pytest.mark.parametrize(("computing", "seconds"), [(0.25, 4.0), (1.0, 4.0), (1.5, 6.0)])
def test_with_room_for_more_a_step_takes_the_longer_of_the_two(
    computing: float, seconds: float
) -> None:
    model = Model(layers=4, slots=2, computing=computing)
    assert [model.step() for _ in range(4)][1:] == pytest.approx([seconds] * 3)


def test_the_first_layers_of_the_next_step_arrive_while_the_engine_drafts() -> None:
    """The link has room for two layers meanwhile, and no more, however long drafting takes."""
    model = Model(layers=4, slots=2, computing=0.0)
    model.step(drafting=10.0)
    assert model.step(drafting=1.0) == pytest.approx(2.0 + 1.0)
    assert model.step() == pytest.approx(3.0)
