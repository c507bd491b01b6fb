"""Targets with M-RoPE: what is admitted with them, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from configurations import changed, refusal_of

from dyntree_plugin.admission import check, mrope
from dyntree_plugin.engine.configuration import WORKERS
from dyntree_plugin.options.options import DynTreeOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _target(config: VllmConfig, architecture: str) -> VllmConfig:
    components = changed(config, "model_config.uses_mrope", True)
    return changed(components, "model_config.architecture", architecture)


@pytest.mark.parametrize("architecture", mrope.TARGETS)
def test_compared_targets_are_admitted_on_a_cpu_and_none_is_on_cuda(
    admitted: VllmConfig, architecture: str
) -> None:
    target = _target(admitted, architecture)
    check.refuse_unserved(target, DynTreeOptions(), "cpu", WORKERS)
    with pytest.raises(check.Refused, match="target model: uses_mrope=True"):
        check.refuse_unserved(target, DynTreeOptions(), "cuda", WORKERS)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("model_config.architecture", "HunYuanVL", "architecture=(True, 'HunYuanVL')"),
        ("model_config.dtype", torch.float16, "dtype=(True, 'float16')"),
        ("parallel_config.tensor_parallel_size", 2, "tensor_parallel_size=(True, 2)"),
        ("parallel_config.pipeline_parallel_size", 2, "pipeline_parallel_size=(True, 2)"),
        ("lora_config", object(), "enable_lora=(True, True)"),
    ],
)
def test_what_was_not_compared_is_refused(
    admitted: VllmConfig, path: str, value: Any, reason: str
) -> None:
    target = _target(admitted, mrope.TARGETS[0])
    assert f"uses_mrope, {reason} is not supported" in refusal_of(changed(target, path, value))
