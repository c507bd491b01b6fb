"""Targets whose images' tokens see each other both ways: what is admitted, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from configurations import admit, refusal_of, with_all
from vllm.config.lora import LoRAConfig

from dyntree_plugin.admission.refusals import IMAGES_BOTH_WAYS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PIPED = {
    "parallel_config.pipeline_parallel_size": 2,
    "scheduler_config.async_scheduling": True,
}


@pytest.mark.parametrize("architecture", IMAGES_BOTH_WAYS)
def test_what_was_not_compared_with_images_is_refused(
    admitted: VllmConfig, architecture: str
) -> None:
    of_target = {"model_config.is_mm_prefix_lm": True, "model_config.architecture": architecture}
    target, adapters = with_all(admitted, of_target), {"lora_config": LoRAConfig()}
    for each in ({"parallel_config.tensor_parallel_size": 2}, adapters):
        admit(with_all(target, each))
    piped = with_all(target, PIPED)
    if architecture.startswith("Gemma4"):
        assert "is_mm_prefix_lm, pipeline_parallel_size=" in refusal_of(piped)
    else:
        admit(piped)
    for without_images in (adapters, PIPED):
        admit(with_all(admitted, without_images))
