"""Targets with recurrent layers: what is admitted with them, and what is refused."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
from configurations import ON_CUDA, WIDTH, admit, changed, refusal_of, with_all
from vllm.config import LoRAConfig

from dyntree_plugin.admission import states
from dyntree_plugin.engine import configuration
from dyntree_plugin.options.options import DynTreeOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _hybrid(config: VllmConfig, architecture: str = states.TARGETS[0]) -> VllmConfig:
    of_target = {"model_config.is_hybrid": True, "model_config.architecture": architecture}
    return with_all(config, of_target)


def _piped(config: VllmConfig, stages: int = 2) -> VllmConfig:
    piped = changed(config, "parallel_config.pipeline_parallel_size", stages)
    return changed(piped, "scheduler_config.async_scheduling", True)


def _without_prefix_cache(config: VllmConfig) -> VllmConfig:
    return changed(config, "cache_config.enable_prefix_caching", False)


@pytest.mark.parametrize("architecture", states.TARGETS)
def test_compared_targets_are_admitted_on_a_cpu(admitted: VllmConfig, architecture: str) -> None:
    hybrid = _hybrid(admitted, architecture)
    for option, path in (
        ("use_replayssm", "cache_config.use_replayssm"),
        ("enable_mamba_cache_stochastic_rounding", "mamba_config.enable_stochastic_rounding"),
    ):
        reason = refusal_of(changed(hybrid, path, True))
        assert f"{option}=True is not supported" in reason
    for each in (hybrid, _piped(hybrid)):
        admit(each)
    admit(changed(hybrid, "lora_config", LoRAConfig()))
    piped = _piped(hybrid, 3)
    assert "or --no-enable-prefix-caching" in refusal_of(piped)
    admit(_without_prefix_cache(piped))


@pytest.mark.parametrize(("size", "served"), [(WIDTH, False), (WIDTH + 1, True)])
def test_a_cached_block_that_a_user_has_sized_holds_a_tree(
    admitted: VllmConfig, size: int, served: bool
) -> None:
    sized = changed(admitted, "cache_config.block_size", size)
    sized.cache_config.user_specified_block_size = True
    if not served:
        reason = refusal_of(_hybrid(sized))
        assert f"block_size={size} is too small" in reason
        assert f"dyntree.node_budget + 1 = {WIDTH + 1} tokens" in reason
    for each in (sized, _without_prefix_cache(_hybrid(sized)), *[_hybrid(sized)] * served):
        admit(each)


@pytest.mark.parametrize(
    ("cache_mode", "size", "wanted"), [("align", 16, 32), ("align", 17, 17), ("none", 16, 16)]
)
def test_other_cached_blocks_are_made_as_long_as_a_tree(
    admitted: VllmConfig, cache_mode: str, size: int, wanted: int
) -> None:
    config = changed(admitted, "cache_config.mamba_cache_mode", cache_mode)
    config.cache_config.block_size = size
    speculation = copy.copy(config.speculative_config)
    configuration.mark_as_tree(speculation, DynTreeOptions().plan_for(speculation))
    configuration.widen_blocks(changed(config, "speculative_config", speculation))
    assert config.cache_config.block_size == wanted


@pytest.mark.parametrize(
    ("nodes", "device", "served"), [(127, "cuda", True), (128, "cuda", False), (128, "cpu", True)]
)
def test_on_cuda_the_layers_limit_the_nodes(
    admitted: VllmConfig, nodes: int, device: str, served: bool
) -> None:
    config = with_all(admitted, ON_CUDA)
    config = changed(config, "speculative_config.num_speculative_tokens", nodes)
    hybrid = _without_prefix_cache(_hybrid(config))
    for each in (config, *[hybrid] * served):
        admit(each, device)
    if not served:
        reason = refusal_of(hybrid, device)
        assert "node_budget=128 is too large: on CUDA trees of" in reason


def test_on_cuda_more_is_refused(admitted: VllmConfig) -> None:
    cached = with_all(admitted, ON_CUDA)
    config = _without_prefix_cache(cached)
    served = [_hybrid(cached, architecture) for architecture in states.TARGETS]
    copied = changed(config, "offload_config.prefetch.offload_group_size", 2)
    for each in (*served, _piped(_hybrid(cached)), _piped(_hybrid(config), 3), copied):
        admit(each, "cuda")
    assert "or --no-enable-prefix-caching" in refusal_of(_piped(_hybrid(cached), 3), "cuda")
    named = "is_hybrid, offload_backend=(True, 'prefetch')"
    assert named in refusal_of(_hybrid(copied), "cuda")


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("model_config.architecture", "BambaForCausalLM", "architecture=(True, 'BambaFor"),
        ("cache_config.mamba_cache_dtype", "float32", "mamba_cache_dtype=(True, 'float32')"),
        ("cache_config.prefix_match_unit", 4, "prefix_match_unit=(True, 4)"),
    ],
)
def test_what_was_not_compared_is_refused_for_recurrent_targets_alone(
    admitted: VllmConfig, option: str, value: object, named: str
) -> None:
    alone = changed(admitted, option, value)
    admit(alone)
    reason = refusal_of(changed(_hybrid(admitted), option, value))
    assert f"is_hybrid, {named}" in reason


@pytest.mark.parametrize("architecture", states.TARGETS)
def test_some_targets_are_admitted_in_float16(admitted: VllmConfig, architecture: str) -> None:
    half = changed(_hybrid(admitted, architecture), "model_config.dtype", "float16")
    if architecture in states.IN_FLOAT16:
        admit(half)
    else:
        named = f"is_hybrid, dtype, architecture=(True, ('float16', {architecture!r}))"
        assert named in refusal_of(half)
