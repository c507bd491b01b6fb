"""Data-parallel ranks that share a target's experts: what is admitted with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from configurations import EAGLE3, Build, admit, changed, refusal_of, with_all

from dyntree_plugin.admission import check

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RANKS = {
    f"{parallel}.{name}": value
    for parallel in ("parallel_config", "speculative_config.target_parallel_config")
    for name, value in (("data_parallel_size", 2), ("is_moe_model", True))
}
SHARED = "data_parallel_size of a mixture of experts"
LAYERS = "eagle_aux_hidden_state_layer_ids"
EXPERTS = "speculative_config.draft_model_config.model_arch_config.num_experts"


@pytest.fixture
def shared(admitted: VllmConfig) -> VllmConfig:
    """Return a configuration for CUDA with two ranks of a mixture of experts."""
    return with_all(admitted, {**RANKS, "parallel_config.worker_cls": "auto"})


def test_ranks_are_admitted_on_cuda_with_drafts_without_experts(shared: VllmConfig) -> None:
    admit(shared, "cuda")
    layers = EXPERTS.replace("model_arch_config.num_experts", f"hf_config.{LAYERS}")
    # The file of an EAGLE-3 head may have its target's numbers.
    head = {"speculative_config.method": "eagle3", layers: EAGLE3[LAYERS], EXPERTS: 8}
    admit(with_all(shared, head), "cuda")


def test_ranks_are_refused_on_a_cpu_for_what_vllm_lacks_there(admitted: VllmConfig) -> None:
    reason = refusal_of(with_all(admitted, RANKS))
    assert "data_parallel_size of a mixture of experts=2 is not supported: vLLM's CPU" in reason
    dense = with_all(admitted, {path: False for path in RANKS if "moe" in path})
    alone = changed(dense, "parallel_config.data_parallel_size", 2)
    admit(alone)


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_drafts_with_experts_are_refused_on_several_ranks(shared: VllmConfig, method: str) -> None:
    with_experts = with_all(shared, {EXPERTS: 8, "speculative_config.method": method})
    assert f"draft's experts, {SHARED}=(True, 2) is not supported" in refusal_of(
        with_experts, "cuda"
    )
    one = {path: 1 for path in RANKS if "size" in path}
    admit(with_all(with_experts, one), "cuda")
    further = with_experts.speculative_config
    with pytest.raises(check.Refused, match=r"dyntree\.drafts, .*draft's experts, .*=\(True, 2\)"):
        check.refuse_further_draft(shared, further, "cuda")


@pytest.mark.parametrize(
    ("option", "path", "value"),
    [
        (f"{SHARED}, pipeline_parallel_size", "parallel_config.pipeline_parallel_size", 2),
        (f"{SHARED}, enable_lora", "lora_config", SimpleNamespace()),
        (f"{SHARED}, target's uses_mrope", "model_config.uses_mrope", True),
        (f"method, {SHARED}=('dflash', 2)", "speculative_config.method", "dflash"),
    ],
)
def test_what_was_not_compared_on_such_ranks_is_refused(
    shared: VllmConfig, option: str, path: str, value: Any
) -> None:
    assert option in refusal_of(changed(shared, path, value), "cuda")


def test_ranks_that_come_and_go_are_refused(admitted: VllmConfig) -> None:
    elastic = changed(admitted, "parallel_config.enable_elastic_ep", True)
    assert "enable_elastic_ep=True" in refusal_of(elastic)
    assert "enable_elastic_ep" not in refusal_of(with_all(admitted, RANKS))


def test_a_target_of_experts_is_known_by_its_file(build: Build, model_folder: Any) -> None:
    experts = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    model = model_folder("experts", num_local_experts=4, sliding_window=None, **experts)
    with pytest.raises(ValueError, match="of a mixture of experts=2 is not supported"):
        build(model=model, data_parallel_size=2)
    build(model=model)
