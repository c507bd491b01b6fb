"""Targets with recurrent layers: what is admitted with them, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from configurations import changed, refusal_of

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
