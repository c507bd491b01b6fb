"""A way to break layers with quantised weights; `sabotage` says more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def scale_of_the_batch(runner: Any) -> Iterator[None]:
    """Round the inputs of layers to FP8 by one scale of all rows, as vLLM does for some experts."""
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

    method = compressed_tensors.CompressedTensorsLinearMethod
    stock: Any = method.apply

    def apply(self: Any, layer: Any, x: torch.Tensor, *given: Any, **named: Any) -> Any:
        scale = x.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        rounded = (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
        return stock(self, layer, rounded, *given, **named)

    with mock.patch.object(method, "apply", apply):
        yield


BROKEN = (scale_of_the_batch,)
