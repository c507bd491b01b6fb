"""LoRA adapters of the target, where a request has several rows of logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner


class AdapterRows(GPUModelRunner):
    """Maps every row with logits to its request's adapter; vLLM maps one row per request."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        # Of the requests' rows with logits, between `prepare_attn` and `_set_active_loras`.
        self._logits_bounds: np.ndarray[Any, Any] | None = None
        self._measures = False

    @contextmanager
    def measured_adapters(self) -> Iterator[None]:
        """Load adapters for steps that are measured: once, since that takes longer than a step."""
        self._measures = True
        try:
            with self.maybe_setup_dummy_loras(self.lora_config):
                yield
        finally:
            self._measures = False

    def prepare_attn(
        self, input_batch: InputBatch
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        self._logits_bounds = input_batch.cu_num_logits_np
        return super().prepare_attn(input_batch)

    def _set_active_loras(
        self, prompt_lora_mapping: tuple[int, ...], *others: Any, **named: Any
    ) -> None:
        """Map the rows.

        The first argument holds the adapter of each request of a batch, or, in a rehearsal, of
        each row with logits.
        """
        bounds, self._logits_bounds = self._logits_bounds, None
        if bounds is not None:
            prompt_lora_mapping = tuple(np.repeat(prompt_lora_mapping, np.diff(bounds)))
        super()._set_active_loras(prompt_lora_mapping, *others, **named)

    @contextmanager
    def maybe_dummy_run_with_lora(
        self,
        lora_config: LoRAConfig | None,
        num_scheduled_tokens: np.ndarray[Any, Any],
        num_sampled_tokens: Any,
        remove_lora: bool = True,
        *others: Any,
        **named: Any,
    ) -> Iterator[None]:
        """Rehearse with adapters; steps that are measured have logits at every row."""
        if self._measures:
            num_sampled_tokens, remove_lora = num_scheduled_tokens, False
        given = lora_config, num_scheduled_tokens, num_sampled_tokens, remove_lora
        with super().maybe_dummy_run_with_lora(*given, *others, **named):
            yield
