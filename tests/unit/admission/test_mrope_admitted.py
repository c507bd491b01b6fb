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
@pytest.mark.parametrize(("device", "worker"), [("cpu", None), ("cuda", "auto")])
def test_compared_targets_are_admitted(
    admitted: VllmConfig, architecture: str, device: str, worker: str | None
) -> None:
    target = _target(admitted, architecture)
    if worker is not None:
        target = changed(target, "parallel_config.worker_cls", worker)
    check.refuse_unserved(target, DynTreeOptions(), device, WORKERS)


def test_a_head_may_have_several_components_and_a_draft_model_may_not(
    admitted: VllmConfig,
) -> None:
    both = changed(
        _target(admitted, mrope.TARGETS[0]),
        "speculative_config.draft_model_config.uses_mrope",
        True,
    )
    head = changed(both, "speculative_config.method", "mtp")
    check.refuse_unserved(head, DynTreeOptions(), "cpu", WORKERS)
    assert "draft model: uses_mrope=True is not supported" in refusal_of(both)


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
