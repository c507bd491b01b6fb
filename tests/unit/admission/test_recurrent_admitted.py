"""Targets with recurrent layers: what is admitted with them, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from configurations import changed, refusal_of
from vllm.config import LoRAConfig

from dyntree_plugin.admission import check
from dyntree_plugin.engine.configuration import WORKERS
from dyntree_plugin.options.options import DynTreeOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def test_recurrent_targets_are_admitted_on_a_cpu_without_a_prefix_cache_or_a_pipeline(
    admitted: VllmConfig,
) -> None:
    hybrid = changed(admitted, "model_config.is_hybrid", True)
    others = changed(hybrid, "cache_config.use_replayssm", True)
    reason = refusal_of(changed(others, "parallel_config.pipeline_parallel_size", 2))
    assert "use_replayssm=True is not supported" in reason
    assert "is_hybrid, pipeline_parallel_size=(True, 2) is not supported" in reason
    assert "enable_prefix_caching=(True, True) is not supported" in reason
    assert "use --no-enable-prefix-caching" in reason
    alone = changed(hybrid, "cache_config.enable_prefix_caching", False)
    check.refuse_unserved(alone, DynTreeOptions(), "cpu", WORKERS)
    with pytest.raises(check.Refused, match="target model: is_hybrid=True"):
        check.refuse_unserved(alone, DynTreeOptions(), "cuda", WORKERS)


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("model_config.dtype", "float16", "dtype=(True, 'float16')"),
        ("cache_config.mamba_cache_dtype", "float32", "mamba_cache_dtype=(True, 'float32')"),
        ("cache_config.mamba_ssm_cache_dtype", "float16", "mamba_ssm_cache_dtype=(True, "),
        ("lora_config", LoRAConfig(), "enable_lora=(True, True)"),
    ],
)
def test_what_was_not_compared_is_refused_for_recurrent_targets_alone(
    admitted: VllmConfig, option: str, value: object, named: str
) -> None:
    alone = changed(changed(admitted, option, value), "cache_config.enable_prefix_caching", False)
    check.refuse_unserved(alone, DynTreeOptions(), "cpu", WORKERS)
    reason = refusal_of(changed(alone, "model_config.is_hybrid", True))
    assert f"is_hybrid, {named}" in reason
