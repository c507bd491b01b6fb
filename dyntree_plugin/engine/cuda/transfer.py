"""Copies to the host beside the device's work."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.v1.worker.gpu.async_utils import stream

from dyntree_plugin.engine.step.ops import Arrival


class StreamSend:
    """Copies on vLLM's stream for outputs, so that the copy does not wait for the next work."""

    def __init__(
        self, main_stream: Callable[[], torch.cuda.Stream], copy_stream: torch.cuda.Stream
    ) -> None:
        """``main_stream``: gives the stream that computes the tensors."""
        self._main_stream = main_stream
        self._copy_stream = copy_stream

    def __call__(self, tensor: torch.Tensor) -> Arrival:
        main, copying = self._main_stream(), self._copy_stream
        # Blocking: whoever waits sleeps instead of polling the driver.
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with stream(copying, main):
            copying.wait_stream(main)
            on_host = tensor.to("cpu", non_blocking=True)
            arrived.record(copying)

        # The device's tensor must outlive the copy, of which its stream knows nothing.
        def arrive(_of: torch.Tensor = tensor) -> torch.Tensor:
            arrived.synchronize()  # sync: when the output is fetched
            return on_host

        return arrive
