"""Refusals name the option, its value and a remedy, and come before any weights load."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from configurations import WIDTH, Build, admit, changed, refusal_of

from dyntree_plugin.admission import refusals, versions
from dyntree_plugin.engine.configuration import (
    plan_in_force,
    tree_plan,
    uses_adaptive_budget,
)
from vllm_cpu_runner.refused import REFUSED

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ENGINE: dict[str, tuple[str, Any]] = {
    "decode_context_parallel_size": ("parallel_config.decode_context_parallel_size", 2),
    "prefill_context_parallel_size": ("parallel_config.prefill_context_parallel_size", 2),
    "enable_dbo": ("parallel_config.enable_dbo", True),
    "ubatch_size": ("parallel_config.ubatch_size", 2),
    "enable_batch_sharded_sampling": ("parallel_config.enable_batch_sharded_sampling", True),
    "kv_cache_dtype (cache, model)": ("cache_config.cache_dtype", "fp8_e5m2"),
    "kv_sharing_fast_prefill": ("cache_config.kv_sharing_fast_prefill", True),
    "enable_prompt_embeds": ("model_config.enable_prompt_embeds", True),
    "enable_trace_replay": ("model_config.enable_trace_replay", True),
    "return_sampling_mask": ("model_config.return_sampling_mask", True),
    "enable_return_routed_experts": ("aux_output_config", SimpleNamespace(enabled=True)),
    "watermark_config": ("watermark_config", SimpleNamespace()),
}
CPU: dict[str, tuple[str, Any]] = {
    "distributed_executor_backend": ("parallel_config.distributed_executor_backend", "ray"),
    "data_parallel_backend": ("parallel_config.data_parallel_backend", "ray"),
}
SPECULATION: dict[str, tuple[str, Any]] = {
    "use_heterogeneous_vocab": ("use_heterogeneous_vocab", True),
    "num_speculative_tokens_per_batch_size": ("num_speculative_tokens_per_batch_size", [(1, 4, 8)]),
    "rejection_sample_method": ("rejection_sample_method", "synthetic"),
    "kv_cache_dtype": ("kv_cache_dtype", "fp8"),
    "draft_tensor_parallel_size (draft, target)": ("draft_tensor_parallel_size", 2),
    "max_model_len (target, draft)": ("draft_model_config.max_model_len", 128),
}
MODEL: dict[str, tuple[str, Any]] = {
    "runner": ("runner_type", "pooling"),
    "is_encoder_decoder": ("is_encoder_decoder", True),
    "is_diffusion": ("is_diffusion", True),
    "is_hybrid": ("is_hybrid", True),
    "has_inner_state": ("has_inner_state", True),
    "use_mla": ("use_mla", True),
    "is_mm_prefix_lm, architecture": ("is_mm_prefix_lm", True),
    "attention_chunk_size": ("attention_chunk_size", 64),
    "uses_mrope": ("uses_mrope", True),
    "dtype": ("dtype", torch.float64),
}
OF_TARGETS = ("is_hybrid", "use_mla", "uses_mrope")
"""What a target on a CPU may have, and a draft may not."""
CHANGES = [
    *((option, path, value) for option, (path, value) in (ENGINE | CPU).items()),
    *((option, f"speculative_config.{p}", v) for option, (p, v) in SPECULATION.items()),
    *((name, f"model_config.{p}", v) for name, (p, v) in MODEL.items() if p not in OF_TARGETS),
    *(
        (option, f"speculative_config.draft_model_config.{p}", v)
        for option, (p, v) in MODEL.items()
        if option != "use_mla"
    ),
]


TABLES = (
    refusals.ENGINE_REFUSALS,
    refusals.CPU_REFUSALS,
    refusals.SPECULATION_REFUSALS,
    refusals.DRAFT_REFUSALS,
    refusals.MODEL_REFUSALS,
)


@pytest.mark.parametrize("trees", [True, False])
def test_models_are_compiled_for_the_rows_of_the_largest_draft_forward(
    build: Build, trees: bool
) -> None:
    """vLLM stops at a forward of more rows than it was compiled for."""
    sizes = {"max_num_seqs": 128, "max_num_batched_tokens": 2048}
    none: dict[str, Any] = {"additional_config": {}, "speculative_config": None}
    config = build(**sizes | ({} if trees else none))
    end = config.compilation_config.get_compile_ranges()[-1].end
    assert end == (128 * (16 + 1) if trees else 2048)


def test_a_configuration_that_a_tree_can_serve_is_admitted(admitted: VllmConfig) -> None:
    admit(admitted)


def test_one_change_is_refused_with_its_option_and_advice(admitted: VllmConfig) -> None:
    for option, path, value in CHANGES:
        reason = refusal_of(changed(admitted, path, value))
        assert f"{option}=" in reason, path
        assert any(r.option == option and r.advice in reason for table in TABLES for r in table)


def test_every_refusal_of_the_tables_is_tested() -> None:
    apart = {
        "VLLM_USE_V2_MODEL_RUNNER",
        "async_scheduling, pipeline_parallel_size",
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND, pipeline_parallel_size",
    }
    assert {r.option for r in refusals.ENGINE_REFUSALS} == ENGINE.keys() | apart
    on_cpu = {"data_parallel_size of a mixture of experts"}
    assert {r.option for r in refusals.CPU_REFUSALS} == CPU.keys() | on_cpu
    of_speculation = (*refusals.SPECULATION_REFUSALS, *refusals.DRAFT_REFUSALS)
    # `test_blocks_admitted` has the other one, which depends on the method.
    assert {r.option for r in of_speculation} == SPECULATION.keys() | {"parallel_drafting"}
    # `test_model_files` has the sizes.
    assert {r.option for r in refusals.MODEL_REFUSALS} == MODEL.keys() | {"sizes"}


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


REPLACED = {
    *("an n-gram drafter", "a DFlash2 drafter", "a drafter with several MTP modules"),
    "adaptive verification",
}
"""Features whose kernels no engine with trees calls."""
OF_RECURRENT_TARGETS = {"KDA with a prefix cache"}
"""Features that are refused by vLLM's options for recurrent targets, or by a layer's class."""
UNSERVED = {
    "decode context parallelism": "decode_context_parallel_size",
    "trace replay": "enable_trace_replay",
    "return_sampling_mask": "return_sampling_mask",
    "batch-sharded sampling": "enable_batch_sharded_sampling",
    "watermarking": "watermark_config",
    "a prompt given as embeddings": "enable_prompt_embeds",
}
"""Features without kernels on the CPU, and vLLM's options that ask for them."""


def test_everything_that_the_cpu_has_no_kernel_for_is_refused_before_the_engine_starts(
    admitted: VllmConfig,
) -> None:
    assert UNSERVED.keys() | REPLACED | OF_RECURRENT_TARGETS == REFUSED.keys()
    changes = {option: (path, value) for option, path, value in reversed(CHANGES)}
    for option in UNSERVED.values():
        assert f"{option}=" in refusal_of(changed(admitted, *changes[option]))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dyntree": {"node_budget": 17}}, "dyntree.node_budget=17 exceeds num_speculative_tokens"),
        ({"dyntree": {"growth": "chain", "width": 2}}, "dyntree.width=2 has no effect with"),
        ({"additional_config": {"dyn_tree": {}}}, "did you mean 'dyntree'"),
        ({"speculative_config": None}, "speculative_config is missing"),
        (
            {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}},
            "speculative_config.method='suffix' is not supported: use a draft model, ",
        ),
        ({"worker_cls": "my.Worker"}, "worker_cls='my.Worker'"),
        ({"scheduler_cls": "my.Scheduler"}, "scheduler_cls='my.Scheduler'"),
        (
            {"pipeline_parallel_size": 2, "async_scheduling": False},
            "async_scheduling, pipeline_parallel_size=(False, 2) is not supported: in a pipeline, "
            "vLLM's synchronous scheduler asks for a step's drafts before it knows the tokens that "
            "they follow; leave async_scheduling out",
        ),
        (
            {
                "pipeline_parallel_size": 2,
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
            },
            "use method 'ngram_gpu' in place of 'ngram', with which vLLM turns it off",
        ),
        (
            {"max_num_batched_tokens": WIDTH + 1, "max_num_seqs": 2, "max_model_len": 16},
            f"max_num_batched_tokens={WIDTH + 1} is too small",
        ),
        ({"max_num_scheduled_tokens": WIDTH}, f"max_num_scheduled_tokens={WIDTH} is too small"),
        (
            {"long_prefill_token_threshold": WIDTH},
            f"long_prefill_token_threshold={WIDTH} is too small: a tree takes dyntree.node_budget "
            f"+ 1 = {WIDTH + 1} tokens of a step; raise long_prefill_token_threshold to at least "
            f"{WIDTH + 1}, or lower dyntree.node_budget to at most {WIDTH - 1}",
        ),
        (
            {"enable_lora": True, "max_num_seqs": 256, "max_num_batched_tokens": 2048},
            "max_num_batched_tokens=2048 is too small with enable_lora: vLLM asks for max_num_seqs "
            f"* (num_speculative_tokens + 1) = 256 * {WIDTH + 1} = {256 * (WIDTH + 1)}; raise it "
            f"to that, or lower max_num_seqs to at most {2048 // (WIDTH + 1)}",
        ),
        (
            {"speculative": {"node_budget": 8}},
            "speculative_config.node_budget=8 is for dyntree: give it as "
            """--dyntree '{"node_budget": 8}'""",
        ),
        (
            {"speculative": {"dyntree": {"width": 2}}, "additional_config": {}},
            """give it as --dyntree '{"width": 2}'""",
        ),
    ],
)
def test_the_engine_does_not_start_with(
    build: Build, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError) as error:
        build(**arguments)
    assert named in str(error.value)


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


def test_more_children_than_tokens_are_refused(admitted: VllmConfig) -> None:
    config = changed(admitted, "model_config.model_arch_config.vocab_size", 8)
    assert "dyntree.children=9 exceeds the vocabulary of 8" in refusal_of(config, children=9)


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
