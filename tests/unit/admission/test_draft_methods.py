"""What is known of vLLM's drafts agrees with vLLM."""

from __future__ import annotations

import dyntree_plugin.engine.cpu.worker  # noqa: F401  # isort: skip  # before vLLM's V2 modules
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.models import registry
from vllm.transformers_utils.configs.speculators.algos import SUPPORTED_SPECULATORS_TYPES
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

from dyntree_plugin.admission import draft_methods, fit


def test_the_classes_of_drafts_are_those_of_vllms_registry() -> None:
    drafts = {*registry._SPECULATIVE_DECODING_MODELS}
    others = {*registry.ModelRegistry.models} - drafts
    assert {each for each in drafts if draft_methods.of_architectures([each]) is None} == set()
    assert {each for each in others if draft_methods.of_architectures([each])} == set()


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        ("EagleDeepSeekMTPModel", "eagle"),
        ("DeepSeekMTPModel", "mtp"),
        ("PeagleQwen3ForCausalLM", "eagle3"),
        ("DSparkDraftModel", "dspark"),
        ("DFlash2DraftModel", "dflash"),
    ],
)
def test_a_class_that_has_two_names_in_one_is_told_apart(architecture: str, method: str) -> None:
    assert draft_methods.of_architectures([architecture]) == method


def test_the_kinds_of_speculators_are_those_of_vllm() -> None:
    known = {
        kind
        for kind in SUPPORTED_SPECULATORS_TYPES
        if draft_methods.speculators_refusal({"speculators_model_type": kind}) is None
    }
    assert known == {*SUPPORTED_SPECULATORS_TYPES}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"eagle_aux_hidden_state_layer_ids": [1, 3], "target_layer_ids": [0]},
        {"eagle_aux_hidden_state_layer_ids": [], "target_layer_ids": [0, 4]},
        {"dflash_config": {"target_layer_ids": [0, 2]}, "dspark_target_layer_ids": [1]},
        {"dflash_config": {"layer_ids": [0, 2]}, "eagle_config": {"layer_ids": [1]}},
        {"dflash_config": None, "dspark_target_layer_ids": [1]},
        {"eagle_config": {"layer_ids": [1], "eagle_aux_hidden_state_layer_ids": [5]}},
    ],
)
def test_the_layers_that_a_draft_reads_are_those_that_vllm_finds(changes: dict[str, Any]) -> None:
    config = SimpleNamespace(**changes)
    speculation: Any = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    assert fit.layers_read(config) == (get_eagle3_aux_layers_from_config(speculation) or ())
