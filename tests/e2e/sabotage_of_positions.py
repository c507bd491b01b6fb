"""Ways to break one mechanism of positions with several components; `sabotage` says more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch


def _shifting(runner: Any, change: Callable[[torch.Tensor], Any]) -> AbstractContextManager[Any]:
    """Shift positions by what ``change`` makes of the shift."""
    tree_positions = runner.model_state.prepare_inputs
    stock = tree_positions._take_shift

    def take_shift() -> Any:
        shift = stock()
        return None if shift is None else change(shift)

    return mock.patch.object(tree_positions, "_take_shift", take_shift)


@contextmanager
def rows_in_place_of_depths(runner: Any) -> Iterator[None]:
    """Give every node the target's position of its row, as in a chain."""
    with _shifting(runner, lambda shift: None):
        yield


@contextmanager
def one_component_shifted(runner: Any) -> Iterator[None]:
    """Give every node the position of its depth in the first component alone."""
    with _shifting(runner, lambda shift: torch.stack([shift, 0 * shift, 0 * shift])):
        yield


@contextmanager
def without_delta(runner: Any) -> Iterator[None]:
    """Let text after a prompt stand at the number of tokens before it, whatever images took."""
    rope = runner.model_state.rope_state
    stock = rope.init_prefill_positions

    def init_prefill_positions(request: int, *given: Any, **named: Any) -> None:
        stock(request, *given, **named)
        rope.prefill_delta.np[request] = 0

    with mock.patch.object(rope, "init_prefill_positions", init_prefill_positions):
        yield


BROKEN = (rows_in_place_of_depths, one_component_shifted, without_delta)
