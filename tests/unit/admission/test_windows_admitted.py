"""Targets whose layers have windows: what is admitted with them, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from configurations import admit, changed
from vllm.config.lora import LoRAConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@pytest.fixture
def windowed(admitted: VllmConfig) -> VllmConfig:
    return changed(admitted, "model_config.hf_text_config.sliding_window", 64)


def test_windows_are_admitted_in_target_and_draft(windowed: VllmConfig) -> None:
    of_draft = "speculative_config.draft_model_config.hf_text_config.sliding_window"
    admit(changed(windowed, of_draft, 32))


@pytest.mark.parametrize(
    ("path", "value"), [("model_config.dtype", torch.float16), ("lora_config", LoRAConfig())]
)
def test_windows_are_admitted_in_fp16_and_with_adapters(
    windowed: VllmConfig, path: str, value: Any
) -> None:
    admit(changed(windowed, path, value))
