"""Engines with a block draft: what is admitted, what is refused, and who reads which number."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configurations import (
    EAGLE3,
    FLASH,
    LAGUNA,
    ON_CUDA,
    UNCHECKED,
    Arguments,
    Build,
    admit,
    changed,
    drafting,
    not_built,
    refusal_of,
    with_all,
)
from vllm.config import KVTransferConfig

from dyntree_plugin.admission.blocks import block_advice
from dyntree_plugin.admission.cuda_backends import CUDA_REFUSALS
from dyntree_plugin.engine import configuration
from dyntree_plugin.engine.configuration import plan_in_force
from dyntree_plugin.options.options import DynTreeOptions

LENGTH = 5
EAGER = "model_config.enforce_eager"
HALF = "model_config.dtype", torch.bfloat16


@pytest.fixture(scope="module")
def block(model_folder: Callable[..., str]) -> Arguments:
    """Return a function that makes the arguments of an engine with a DFlash draft.

    ``changes`` are those of the draft's configuration.
    """

    def make(method: str = "dflash", **changes: Any) -> dict[str, Any]:
        folder = model_folder("block", **FLASH | {"num_hidden_layers": 1} | changes)
        return drafting(folder, method, LENGTH)

    return make


def test_the_engine_has_the_trees_number_and_the_plan_the_blocks(
    build: Build, block: Arguments
) -> None:
    config = build(**block(), dyntree={"node_budget": 24})
    plan = plan_in_force(config.speculative_config)
    assert plan is not None
    assert config.num_speculative_tokens == 24
    assert (plan.shape.block, plan.shape.max_depth) == (LENGTH, LENGTH)
    assert plan.further_forwards == 0
    # The root's row and those of the masks.
    assert configuration.scratch_slots(config.speculative_config) == LENGTH + 1
    assert configuration.most_draft_rows(config) >= config.scheduler_config.max_num_seqs * 6


@pytest.mark.parametrize(
    ("options", "nodes", "depth"),
    [({}, 16, LENGTH), ({"node_budget": 3}, 3, 3), ({"max_depth": 2, "lookup": "off"}, 16, 2)],
)
def test_the_block_limits_the_depth_and_not_the_nodes(
    options: dict[str, Any], nodes: int, depth: int
) -> None:
    shape = DynTreeOptions(**options).resolve(LENGTH, block=True).shape
    assert (shape.node_budget, shape.max_depth) == (nodes, depth)
    assert DynTreeOptions().resolve(40, block=True).shape.node_budget == 40


def test_options_that_do_not_fit_are_named(build: Build, block: Arguments) -> None:
    for options, named in (
        ({"max_depth": 6}, "max_depth=6 cannot be reached with num_speculative_tokens=5"),
        ({"growth": "chain"}, "growth=chain does not go with a block draft: use topk"),
        ({"exactness": "distribution"}, "distribution does not go with a block draft: use tokens"),
        ({"max_forwards": 2}, "max_forwards=2 has no effect with a block draft"),
    ):
        assert named in not_built(build, **block(), dyntree=options)


WINDOWS = {"sliding_window": 32, "use_sliding_window": True}
OF_TOKENS = LAGUNA | {"draft_vocab_size": 128}
MIXED = WINDOWS | {
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
}
ANCHORED = {"mask_token_id": 1, "sample_from_anchor": True}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["LiLiCorrDraftModel"]}, "draft's architectures=['LiLiCorrDraftModel']"),
        ({"draft_vocab_size": 64}, "draft_vocab_size, dspark_draft_topk=(64, None)"),
        ({"dflash_config": ANCHORED}, "dflash_config.sample_from_anchor=True"),
        (MIXED, "draft's layer_types (causal)=[False, True]"),
    ],
)
def test_other_drafts_are_refused(
    build: Build, block: Arguments, changes: dict[str, Any], named: str
) -> None:
    refused = not_built(build, **block(**changes))
    assert f"speculative_config.{named} is not supported" in refused


QUANTISED = "speculative_config.draft_model_config.quantization", "compressed-tensors"


def test_options_of_recipes_are_admitted(build: Build, block: Arguments) -> None:
    admitted = changed(build(**block()), *UNCHECKED)
    for path, value in (
        ("parallel_config.tensor_parallel_size", 2),
        ("model_config.dtype", torch.float16),
        ("lora_config", object()),
        ("kv_transfer_config", KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")),
        QUANTISED,
    ):
        admit(changed(admitted, path, value))


def test_a_quantised_draft_that_vllm_misreads_is_refused(build: Build, block: Arguments) -> None:
    admitted = changed(build(**block(**OF_TOKENS)), *UNCHECKED)
    admit(admitted)
    named = "quantization=(['DFlashLagunaForCausalLM'], 'compressed-tensors') is not supported"
    assert named in refusal_of(changed(admitted, *QUANTISED))


def test_what_was_not_compared_is_refused(build: Build, block: Arguments) -> None:
    admitted = changed(build(**block()), *UNCHECKED)
    for name, found in (("use_mla", (True, False)), ("uses_mrope", (False, True))):
        reason = refusal_of(changed(admitted, f"model_config.{name}", True))
        assert f"('dflash', {found}) is not supported" in reason


def test_dspark_is_admitted_without_a_choice_of_candidates(build: Build, block: Arguments) -> None:
    of_qwen3 = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 2}
    assert build(**block("dspark", **of_qwen3)).num_speculative_tokens == 16
    with pytest.raises(ValueError, match=r"dspark_draft_topk=\(None, 8\) is not supported"):
        build(**block("dspark", **of_qwen3, dspark_draft_topk=8))


@pytest.mark.parametrize(
    "windows",
    [
        OF_TOKENS,
        {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"},
        MIXED | {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0], "causal": True}},
    ],
)
def test_windows_are_admitted(build: Build, block: Arguments, windows: dict[str, Any]) -> None:
    changes = WINDOWS | {"layer_types": ["sliding_attention"]} | windows
    assert build(**block(**changes)).num_speculative_tokens == 16


def test_on_cuda_trees_are_admitted_and_called_unproven(build: Build, block: Arguments) -> None:
    admitted = changed(build(**block()), *UNCHECKED)
    on_cuda = with_all(admitted, ON_CUDA)
    plan = plan_in_force(admitted.speculative_config)
    assert plan is not None
    admit(on_cuda, "cuda")
    assert "unproven on a GPU" in (block_advice(on_cuda, plan, "cuda") or "")
    exact = changed(changed(admitted, "model_config.dtype", torch.float32), EAGER, True)
    assert block_advice(exact, plan, "cpu") is None
    assert "bfloat16" in (block_advice(changed(exact, *HALF), plan, "cpu") or "")


@pytest.fixture(scope="module")
def masked(model_folder: Callable[..., str]) -> Arguments:
    """Return a function that makes the arguments of an engine with a draft that reads masks.

    ``changes`` are those of the draft's configuration.
    """

    def make(method: str = "draft_model", **changes: Any) -> dict[str, Any]:
        own = EAGLE3 if method == "eagle3" else {}
        folder = model_folder("masked", **{"pard_token": 1} | own | changes)
        return drafting(folder, method, LENGTH, parallel_drafting=True)

    return make


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_draft_that_reads_masks_is_a_block_draft(
    build: Build, masked: Arguments, method: str
) -> None:
    """vLLM's V2 runner, which has no such drafts, and its scheduler are told nothing of masks."""
    config = build(**masked(method), dyntree={"node_budget": 24})
    plan, scheduler = plan_in_force(config.speculative_config), config.scheduler_config
    assert plan is not None
    assert (plan.shape.block, plan.shape.max_depth, plan.shape.head) == (LENGTH, LENGTH, False)
    assert config.speculative_config is not None
    assert not config.speculative_config.parallel_drafting
    # The rows of every forward: emitted tokens and masks, or chunks of prompts and masks.
    masks = scheduler.max_num_seqs * (LENGTH + LENGTH)
    assert configuration.most_draft_rows(config) >= scheduler.max_num_batched_tokens + masks
    # The root's own token, and for a draft model another one.
    batched = 24 + (2 if method == "draft_model" else 1)
    small = {"max_num_seqs": 1, "max_model_len": 16, "dyntree": {"node_budget": 24}}
    build(**masked(method), **small, max_num_batched_tokens=batched)
    fewer = masked(method) | small | {"max_num_batched_tokens": batched - 1}
    assert "a tree takes dyntree" in not_built(build, **fewer)


MASK = "parallel_drafting, draft's mask token and vocabulary="
OTHER = "Eagle3DeepseekV2ForCausalLM"


@pytest.mark.parametrize(
    ("method", "changes", "named"),
    [
        ("draft_model", {"pard_token": None}, f"{MASK}(None, "),
        ("draft_model", {"pard_token": 1 << 20}, f"{MASK}(1048576, "),
        (
            "eagle3",
            {"architectures": [OTHER]},
            f"parallel_drafting, draft's architectures=[{OTHER!r}]",
        ),
        ("eagle", {"architectures": ["LlamaForCausalLM"]}, "parallel_drafting=True"),
    ],
)
def test_drafts_that_read_no_masks_are_refused(
    build: Build, masked: Arguments, method: str, changes: dict[str, Any], named: str
) -> None:
    assert f"speculative_config.{named}" in not_built(build, **masked(method, **changes))


def test_what_does_not_go_with_masks_is_refused(build: Build, masked: Arguments) -> None:
    """vLLM would derive another configuration for the head, with a runner that refuses it."""
    arguments = masked("eagle3")
    arguments["speculative_config"]["attention_backend"] = "CPU_ATTN"
    with pytest.raises(ValueError, match=r"attention_backend=.* is not supported"):
        build(**arguments)
    draft = masked()["speculative_config"]["model"]
    with pytest.raises(ValueError, match="does not go with a block draft"):
        build(**masked(), dyntree={"drafts": [draft]})


@pytest.mark.parametrize(
    "path", ["attention_config.backend", "speculative_config.attention_backend"]
)
def test_masks_are_refused_on_flashinfer(build: Build, masked: Arguments, path: str) -> None:
    config = changed(build(**masked()), "speculative_config.parallel_drafting", True)
    config = changed(with_all(config, ON_CUDA), *UNCHECKED)
    for name in ("FLASH_ATTN", "FLASHINFER"):
        named = changed(config, path, SimpleNamespace(name=name))
        reasons = [each.option for each in CUDA_REFUSALS if each(named)]
        assert ("attention_backend with parallel_drafting" in reasons) == (name == "FLASHINFER")
