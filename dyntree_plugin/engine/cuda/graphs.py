"""CUDA graphs of a function of a batch: one for each of a few batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

Tensors = tuple[torch.Tensor, ...]
Call = Callable[[], Tensors]
Replay = Callable[[], None]
Record = Callable[[Call], tuple[Replay, Tensors]]
"""Capture a call; return how to replay it, and the tensors that hold the results."""


@dataclass
class Input:
    """The memory of one argument.

    ``buffer`` [M * rows, ...] for at most M requests. ``padding``: the value of entries without a
    request; None if any value will do. A batch may have fewer than ``rows`` entries per request.
    """

    buffer: torch.Tensor
    padding: int | None = None
    rows: int = 1

    def __post_init__(self) -> None:
        self._not_padded = self.buffer.shape[0]

    def pad_behind(self, requests: int) -> None:
        """Write padding after the entries of so many requests."""
        end = requests * self.rows
        if self.padding is not None and end < self._not_padded:
            self.buffer[end : self._not_padded].fill_(self.padding)
        self._not_padded = end


class RequestGraphs:
    """Replays a function of tensors [R, ...] for batches of any number of requests.

    Arguments are copied to fixed addresses, from the host or the device, and padded to the next
    captured batch size.
    """

    def __init__(
        self,
        function: Callable[..., Tensors],
        inputs: Sequence[Input],
        sizes: Sequence[int],
    ) -> None:
        """``inputs``: one per argument. ``sizes``: batch sizes to capture, ascending."""
        self._function = function
        self._inputs = inputs
        self.sizes = tuple(sizes)
        self._captured: dict[int, tuple[Replay, Tensors]] = {}

    def capture(self, record: Record, places: slice = slice(None)) -> None:
        """Capture every size; the largest first, whose memory the others then share.

        ``places``: of the sizes to capture, counted from the largest.
        """
        self.fill(())
        for size in self.sizes[::-1][places]:
            arguments = [each.buffer[: size * each.rows] for each in self._inputs]
            self._captured[size] = record(partial(self._function, *arguments))

    def __call__(self, *arguments: torch.Tensor) -> Tensors | None:
        """Return the function's values [R, ...]; None if the batch is too large.

        The next call overwrites them. The first argument has one entry per request.
        """
        requests = arguments[0].shape[0]
        if not self.serves(requests):
            return None
        self.fill(arguments)
        return self.replay(requests)

    def serves(self, requests: int) -> bool:
        """Return whether a batch of so many requests was captured."""
        return self._size(requests) in self._captured

    def replay(self, requests: int) -> Tensors:
        """Replay with the arguments that were filled in last, which have as many requests."""
        replay, values = self._captured[self._size(requests)]
        replay()
        return tuple(value[:requests] for value in values)

    def _size(self, requests: int) -> int:
        """Return the smallest size that fits, 0 if none does."""
        return next((size for size in self.sizes if size >= requests), 0)

    def fill(self, arguments: Sequence[torch.Tensor]) -> None:
        """Copy a batch to the fixed addresses; without arguments, a batch of padding alone."""
        requests = arguments[0].shape[0] if arguments else 0
        for each in self._inputs:
            each.pad_behind(requests)
        for each, argument in zip(self._inputs, arguments, strict=False):
            each.buffer[: argument.shape[0]].copy_(argument, non_blocking=True)


def request_sizes(most: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, up to ``most``: padding less than doubles a batch."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*powers, most)
