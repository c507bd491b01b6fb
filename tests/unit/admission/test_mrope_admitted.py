"""Targets with M-RoPE: what is admitted with them, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from configurations import ON_CUDA, admit, changed, refusal_of, with_all
from vllm.config.lora import LoRAConfig

from dyntree_plugin.admission import mrope

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _target(config: VllmConfig, architecture: str) -> VllmConfig:
    of_target = {"model_config.uses_mrope": True, "model_config.architecture": architecture}
    return with_all(config, of_target)


@pytest.mark.parametrize("architecture", mrope.TARGETS)
def test_compared_targets_are_admitted(admitted: VllmConfig, architecture: str) -> None:
    target = _target(admitted, architecture)
    admit(target)
    admit(with_all(target, ON_CUDA), "cuda")


def test_a_head_may_have_several_components_and_a_draft_model_may_not(
    admitted: VllmConfig,
) -> None:
    both = changed(
        _target(admitted, mrope.TARGETS[0]),
        "speculative_config.draft_model_config.uses_mrope",
        True,
    )
    head = changed(both, "speculative_config.method", "mtp")
    admit(head)
    assert "draft model: uses_mrope=True is not supported" in refusal_of(both)


def test_other_classes_are_refused(admitted: VllmConfig) -> None:
    reason = refusal_of(_target(admitted, "HunYuanVL"))
    assert "uses_mrope, architecture=(True, 'HunYuanVL') is not supported" in reason


def test_all_options_are_admitted_that_other_targets_have(admitted: VllmConfig) -> None:
    options = {
        "model_config.dtype": torch.float16,
        "parallel_config.tensor_parallel_size": 2,
        "parallel_config.pipeline_parallel_size": 2,
        "scheduler_config.async_scheduling": True,
        "lora_config": LoRAConfig(),
        "cache_config.cache_dtype": "fp8",
    }
    admit(with_all(_target(admitted, mrope.TARGETS[0]), options))
