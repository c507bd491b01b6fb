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
    ``constant``: nothing writes to an argument after it was copied.
    """

    buffer: torch.Tensor
    padding: int | None = None
    rows: int = 1
    constant: bool = False

    def __post_init__(self) -> None:
        self._not_padded = self.buffer.shape[0]
        self._copied: torch.Tensor | None = None

    def fill(self, requests: int, argument: torch.Tensor | None = None) -> None:
        """Copy the entries of so many requests, unless they are here, and write padding after them.

        Without an argument, write padding alone.
        """
        if argument is not None and argument is self._copied:
            return
        self._copied = argument if self.constant else None
        end = requests * self.rows
        if self.padding is not None and end < self._not_padded:
            self.buffer[end : self._not_padded].fill_(self.padding)
        self._not_padded = end
        if argument is not None and argument.data_ptr() != self.buffer.data_ptr():
            self.buffer[: argument.shape[0]].copy_(argument, non_blocking=True)


class RequestGraphs:
    """Replays a function of tensors [R, ...] for batches of any number of requests.

    Arguments are copied to fixed addresses, from the host or the device, and padded to the next
    captured batch size. One that was written to its fixed address is not copied.
    """

    def __init__(
        self,
        function: Callable[..., Tensors],
        inputs: Sequence[Input],
        sizes: Sequence[int],
    ) -> None:
        """``inputs``: one per argument. ``sizes``: batch sizes to capture, ascending."""
        self._function = function
        self.inputs = [*inputs]
        self._fewest = len(inputs)
        self.sizes = tuple(sizes)
        self._captured: dict[int, tuple[Replay, Tensors]] = {}
        # By number of requests: to slice the values anew in every step would cost microseconds.
        self._served: dict[int, tuple[Replay, Tensors] | None] = {}

    def capture(self, record: Record, places: slice = slice(None)) -> None:
        """Capture every size; the largest first, whose memory the others then share.

        ``places``: of the sizes to capture, counted from the largest.
        """
        self.fill(())
        for size in self.sizes[::-1][places]:
            arguments = [each.buffer[: size * each.rows] for each in self.inputs]
            self._captured[size] = record(partial(self._function, *arguments))
        self._served.clear()

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
        return self._for(requests) is not None

    def size_for(self, requests: int) -> int:
        """Return the smallest size that fits; 0 if there is none."""
        return next((size for size in self.sizes if size >= requests), 0)

    def replay(self, requests: int) -> Tensors:
        """Replay with the arguments that were filled in last, which have as many requests.

        Raises:
            ValueError: if no such batch was captured.
        """
        served = self._for(requests)
        if served is None:
            raise ValueError(f"no graph was captured for {requests} requests")
        replay, values = served
        replay()
        return values

    def _for(self, requests: int) -> tuple[Replay, Tensors] | None:
        """Return the replay of the smallest size that fits, and views of its values; None if there
        is none."""
        if requests not in self._served:
            found = self._captured.get(self.size_for(requests))
            self._served[requests] = found and (found[0], tuple(v[:requests] for v in found[1]))
        return self._served[requests]

    def fill(self, arguments: Sequence[torch.Tensor]) -> None:
        """Copy a batch to the fixed addresses; without arguments, a batch of padding alone.

        Those of inputs that were added later may be missing, if a graph of this size does not read
        them.
        """
        if not arguments:
            for each in self.inputs:
                each.fill(0)
            return
        requests = arguments[0].shape[0]
        if len(arguments) not in (self._fewest, len(self.inputs)):
            raise ValueError(f"{len(arguments)} arguments for {len(self.inputs)} inputs")
        for each, argument in zip(self.inputs[: len(arguments)], arguments, strict=True):
            each.fill(requests, argument)


def request_sizes(most: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, up to ``most``: padding less than doubles a batch."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*powers, most)
