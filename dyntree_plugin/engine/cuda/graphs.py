"""CUDA graphs of a function of a batch, one for each of a few numbers of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

Tensors = tuple[torch.Tensor, ...]
Call = Callable[[], Tensors]
Replay = Callable[[], None]
Record = Callable[[Call], tuple[Replay, Tensors]]
"""Captures a call; returns how to replay it, and where the results then are."""


@dataclass
class Input:
    """One argument of the function: for the most requests [M * rows, ...], and what an entry holds
    that no request fills; None where anything will do. A batch may have fewer than ``rows`` entries
    for each of its requests."""

    buffer: torch.Tensor
    padding: int | None = None
    rows: int = 1

    def __post_init__(self) -> None:
        self._not_padded = self.buffer.shape[0]

    def pad_behind(self, requests: int) -> None:
        """Have padding behind the entries of so many requests, which are to be filled."""
        end = requests * self.rows
        if self.padding is not None and end < self._not_padded:
            self.buffer[end : self._not_padded].fill_(self.padding)
        self._not_padded = end


class RequestGraphs:
    """Replays ``function`` of tensors [R, ...] for batches of any number of requests.

    Its arguments are copied, from the host or the device, to fixed addresses, padded to the next
    number that was captured.
    """

    def __init__(
        self,
        function: Callable[..., Tensors],
        inputs: Sequence[Input],
        sizes: Sequence[int],
    ) -> None:
        """``inputs``: one per argument. ``sizes``: numbers of requests to capture; ascending."""
        self._function = function
        self._inputs = inputs
        self.sizes = tuple(sizes)
        self._captured: dict[int, tuple[Replay, Tensors]] = {}

    def capture(self, record: Record) -> None:
        """Capture every size, the largest first, whose memory the others then share."""
        self.fill(())
        for size in reversed(self.sizes):
            arguments = [each.buffer[: size * each.rows] for each in self._inputs]
            self._captured[size] = record(partial(self._function, *arguments))

    def __call__(self, *arguments: torch.Tensor) -> Tensors | None:
        """The function's values [R, ...], overwritten by the next call; None where the batch is
        larger than all that was captured. The first argument has one entry per request."""
        requests = arguments[0].shape[0]
        if not self.serves(requests):
            return None
        self.fill(arguments)
        return self.replay(requests)

    def serves(self, requests: int) -> bool:
        """Whether a batch of so many requests was captured."""
        return self._size(requests) in self._captured

    def replay(self, requests: int) -> Tensors:
        """As a call with the arguments that were filled in last, of as many requests."""
        replay, values = self._captured[self._size(requests)]
        replay()
        return tuple(value[:requests] for value in values)

    def _size(self, requests: int) -> int:
        """The next number that was to be captured, 0 for none."""
        return next((size for size in self.sizes if size >= requests), 0)

    def fill(self, arguments: Sequence[torch.Tensor]) -> None:
        """Take in a batch; without arguments, one of padding alone."""
        requests = arguments[0].shape[0] if arguments else 0
        for each in self._inputs:
            each.pad_behind(requests)
        for each, argument in zip(self._inputs, arguments, strict=False):
            each.buffer[: argument.shape[0]].copy_(argument, non_blocking=True)


def request_sizes(most: int) -> tuple[int, ...]:
    """Numbers of requests to capture, up to ``most``: a batch pays for less than twice its own."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*powers, most)
