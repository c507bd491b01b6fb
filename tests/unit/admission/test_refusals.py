"""Refusals name the option, its value and a remedy, and come before any weights load."""

from __future__ import annotations

import copy
from ast import literal_eval
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from configurations import WIDTH, Build, admit, changed, not_built, refusal_of, with_all

from dyntree_plugin.admission import versions
from dyntree_plugin.engine import configuration
from dyntree_plugin.engine.configuration import (
    plan_in_force,
    tree_plan,
    uses_adaptive_budget,
)
from dyntree_plugin.options.options import DynTreeOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def test_what_is_for_vllms_own_chains_is_left_out(build: Build, logged: Callable[[], str]) -> None:
    drawn = {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}
    config = build(speculative=drawn | {"enable_adaptive_verification": True})
    plan, speculation = tree_plan(config), config.speculative_config
    assert plan is not None
    assert speculation is not None
    assert plan.exactness == "distribution"
    assert speculation.draft_sample_method == "greedy"
    assert speculation.rejection_sample_method == "standard"
    assert not speculation.enable_adaptive_verification
    said = logged()
    assert "draft_sample_method=probabilistic" in said
    assert "enable_adaptive_verification is for vLLM's chains and is left out" in said


NOT_STARTED = """
{"dyntree": {"node_budget": 17}} → dyntree.node_budget=17 exceeds num_speculative_tokens
{"dyntree": {"growth": "chain", "width": 2}} → dyntree.width=2 has no effect with
{"additional_config": {"dyn_tree": {}}} → did you mean 'dyntree'
{"speculative_config": None} → speculative_config is missing
{"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}} → \
speculative_config.method='suffix' is not supported: use a draft model,
{"worker_cls": "my.Worker"} → worker_cls='my.Worker'
{"scheduler_cls": "my.Scheduler"} → scheduler_cls='my.Scheduler'
{"pipeline_parallel_size": 2, "async_scheduling": False} → \
async_scheduling, pipeline_parallel_size=(False, 2) is not supported: in a pipeline, vLLM's \
synchronous scheduler asks for a step's drafts before it knows the tokens that they follow; leave
{"pipeline_parallel_size": 2, "speculative_config": {"method": "ngram", \
"num_speculative_tokens": 4}} → use method 'ngram_gpu' in place of 'ngram', with which vLLM turns
{"max_num_batched_tokens": 17, "max_num_seqs": 2, "max_model_len": 16} → \
max_num_batched_tokens=17 is too small
{"max_num_scheduled_tokens": 16} → max_num_scheduled_tokens=16 is too small
{"long_prefill_token_threshold": 16} → long_prefill_token_threshold=16 is too small: a \
tree takes dyntree.node_budget + 1 = 17 tokens of a step; raise \
long_prefill_token_threshold to at least 17, or lower dyntree.node_budget to at most \
15
{"enable_lora": True, "max_num_seqs": 256, "max_num_batched_tokens": 2048} → \
max_num_batched_tokens=2048 is too small with enable_lora: vLLM asks for max_num_seqs * \
(num_speculative_tokens + 1) = 256 * 17 = 4352; raise it to that, or \
lower max_num_seqs to at most 120
{"speculative": {"node_budget": 8}} → \
speculative_config.node_budget=8 is for dyntree: give it as --dyntree '{"node_budget": 8}'
{"speculative": {"dyntree": {"width": 2}}, "additional_config": {}} → \
give it as --dyntree '{"width": 2}'
"""


@pytest.mark.parametrize("line", NOT_STARTED.strip().splitlines())
def test_the_engine_does_not_start_with(build: Build, line: str) -> None:
    """A line has arguments of an engine with trees of 16 nodes, and a part of what is said."""
    arguments, _, said = line.partition(" → ")
    assert said in not_built(build, **literal_eval(arguments))


@pytest.mark.parametrize("stages", [1, 2])
def test_a_pipeline_is_scheduled_asynchronously(build: Build, stages: int) -> None:
    """vLLM never does that on a CPU, and derives the configuration of the draft, of one stage."""
    from vllm.config import replace

    config = build(pipeline_parallel_size=stages)
    speculation = config.speculative_config
    assert speculation is not None
    draft = replace(config, parallel_config=speculation.draft_parallel_config)
    for each in (config, draft):
        assert each.scheduler_config.async_scheduling == (stages > 1)


def test_a_draft_with_a_shorter_context_is_refused_until_the_target_is_cut_to_it(
    build: Build, model_folder: Callable[..., str]
) -> None:
    short = {"model": model_folder("short", max_position_embeddings=128)}
    with pytest.raises(ValueError, match=r"max_model_len \(target, draft\)=\(256, 128\)"):
        build(speculative=short)
    build(speculative=short, max_model_len=128)


def test_the_v1_runner_is_refused(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER='0'"):
        build()


def test_a_rank_of_a_dense_target_is_an_engine_of_its_own_with_the_same_trees(
    build: Build,
) -> None:
    config = build(data_parallel_size=2)
    plan = tree_plan(config)
    assert uses_adaptive_budget(config)
    # vLLM does this in the process of every such rank.
    config.parallel_config.reconfigure_for_independent_dp_rank()
    assert tree_plan(config) == plan == plan_in_force(config.speculative_config)
    assert plan is not None
    assert plan.shape.max_depth == 16
    assert uses_adaptive_budget(config)


def test_the_least_limits_of_a_step_are_admitted(build: Build) -> None:
    build(max_num_scheduled_tokens=WIDTH + 1, long_prefill_token_threshold=WIDTH + 1)
    build({"node_budget": WIDTH - 1}, long_prefill_token_threshold=WIDTH)


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.31.2", False),
        ("0.32.0", True),
        ("0.33.1.dev7+gabcdef", True),
        ("0.34.0rc1", False),
    ],
)
def test_only_the_supported_versions_of_vllm_are_served(
    admitted: VllmConfig, monkeypatch: pytest.MonkeyPatch, version: str, supported: bool
) -> None:
    monkeypatch.setattr(versions, "installed_vllm", lambda: ("vllm", version))
    if supported:
        admit(admitted)
    else:
        assert f"vllm={version} is not supported" in refusal_of(admitted)


def test_a_pipeline_over_vllms_first_executor_for_ray_is_refused(
    admitted: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_ray = changed(admitted, "parallel_config.distributed_executor_backend", "ray")
    piped = changed(over_ray, "parallel_config.pipeline_parallel_size", 2)
    named = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND, pipeline_parallel_size=('0', 2)"
    assert named not in refusal_of(piped)  # Ray is refused on a CPU.
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    assert named in refusal_of(piped)
    assert named not in refusal_of(over_ray)


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


@pytest.mark.parametrize(("in_chunks", "scheduled"), [(True, 48), (False, 2048)])
def test_a_prompt_that_is_read_whole_has_room_in_a_step(
    admitted: VllmConfig, in_chunks: bool, scheduled: int
) -> None:
    """vLLM raises the tokens of a batch for latent attention on a CPU, after those of a step."""
    sizes = {
        "scheduler_config.enable_chunked_prefill": in_chunks,
        "scheduler_config.max_num_batched_tokens": 2048,
        "scheduler_config.max_num_scheduled_tokens": 48,
    }
    config = with_all(admitted, sizes)
    configuration.choose_scheduler(config)
    assert config.scheduler_config.max_num_scheduled_tokens == scheduled
