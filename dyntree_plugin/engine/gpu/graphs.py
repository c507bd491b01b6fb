"""CUDA graphs of a function of a batch, one for each of a few numbers of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

Replay = Callable[[], None]
Record = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]
"""Captures a call; returns how to replay it, and where the result then is."""


@dataclass(frozen=True)
class Input:
    """One argument of the function: for the most requests [M, ...], and what an entry holds that
    no request fills; None where anything will do."""

    buffer: torch.Tensor
    padding: int | None = None


class RequestGraphs:
    """Replays ``function`` of tensors [R, ...] for batches of any number of requests.

    Its arguments are copied to fixed addresses, padded to the next number that was captured.
    """

    def __init__(
        self,
        function: Callable[..., torch.Tensor],
        inputs: Sequence[Input],
        sizes: Sequence[int],
    ) -> None:
        """``inputs``: one per argument. ``sizes``: numbers of requests to capture; ascending."""
        self._function = function
        self._inputs = inputs
        self.sizes = tuple(sizes)
        self._captured: dict[int, tuple[Replay, torch.Tensor]] = {}

    def capture(self, record: Record) -> None:
        """Capture every size, the largest first, whose memory the others then share."""
        self.fill(())
        for size in reversed(self.sizes):
            arguments = [each.buffer[:size] for each in self._inputs]
            self._captured[size] = record(partial(self._function, *arguments))

    def __call__(self, *arguments: torch.Tensor) -> torch.Tensor | None:
        """The function's value [R, ...], overwritten by the next call; None where the batch is
        larger than all that was captured."""
        requests = arguments[0].shape[0]
        size = next((size for size in self.sizes if size >= requests), None)
        if size is None or size not in self._captured:
            return None
        self.fill(arguments)
        replay, value = self._captured[size]
        replay()
        return value[:requests]

    def fill(self, arguments: Sequence[torch.Tensor]) -> None:
        """Take in a batch; without arguments, one of padding alone."""
        requests = arguments[0].shape[0] if arguments else 0
        for each in self._inputs:
            if each.padding is not None:
                each.buffer[requests:].fill_(each.padding)
        for each, argument in zip(self._inputs, arguments, strict=False):
            each.buffer[:requests].copy_(argument)


def request_sizes(most: int) -> tuple[int, ...]:
    """Numbers of requests to capture, up to ``most``: a batch pays for less than twice its own."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*powers, most)
