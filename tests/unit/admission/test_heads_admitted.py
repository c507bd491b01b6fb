"""Engines whose draft is a head of the target: what is admitted, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from configurations import EAGLE3, WIDTH, Arguments, Build, admit, changed, drafting, refusal_of

from dyntree_plugin.admission import fit, heads
from dyntree_plugin.engine import configuration
from dyntree_plugin.engine.configuration import WORKERS, plan_in_force


@pytest.fixture(scope="module")
def head(model_folder: Callable[..., str]) -> Arguments:
    """Return a function that makes the arguments of an engine with an EAGLE-3 head.

    ``changes`` are those of the head's configuration.
    """
    return lambda **changes: drafting(model_folder("head", **EAGLE3 | changes), "eagle3")


def test_a_head_is_admitted(build: Build, head: Arguments) -> None:
    config = build(**head())
    plan = plan_in_force(config.speculative_config)
    assert plan is not None
    assert (plan.has_draft, plan.shape.head, plan.shape.shift) == (True, True, -1)
    assert plan.shape.grafts == WIDTH
    assert config.parallel_config.worker_cls == WORKERS["cpu"]


def test_a_target_whose_class_gives_no_states_of_layers_is_refused(
    build: Build, head: Arguments, model_folder: Callable[..., str]
) -> None:
    lacking = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    said = r"method='eagle3' is not supported .* architecture='Gemma2ForCausalLM'.*SupportsEagle3"
    with pytest.raises(ValueError, match=said):
        build(**head(), model=model_folder("target", **lacking))


@pytest.mark.parametrize("kind", [AttributeError, TypeError])
def test_an_error_in_the_checks_is_no_mistake_of_the_users(
    build: Build, head: Arguments, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def broken(_: object) -> Iterator[str]:
        raise kind("broken")

    monkeypatch.setattr(fit, "_states", broken)
    with pytest.raises(kind, match="broken"):
        build(**head())


def test_start_up_says_that_a_head_is_split_like_the_target(build: Build, head: Arguments) -> None:
    path = "speculative_config.draft_tensor_parallel_size"
    with_head = build(**head())
    assert list(heads.advice(with_head)) == []
    (said,) = heads.advice(changed(with_head, path, 2))
    assert said.startswith("draft_tensor_parallel_size=2 has no effect")


def test_a_head_declared_for_a_shorter_context_is_admitted(build: Build, head: Arguments) -> None:
    """vLLM makes the head's positions reach as far as the target's."""
    short = build(**head(max_position_embeddings=64))
    speculation = short.speculative_config
    assert speculation is not None
    draft = speculation.draft_model_config
    assert draft.max_model_len < short.model_config.max_model_len
    # What the head's layers are built for.
    assert draft.hf_config.max_position_embeddings >= short.model_config.max_model_len


def test_a_head_needs_a_slot_less_than_a_draft_model(build: Build, head: Arguments) -> None:
    """The root's row has the position before it, which the target has filled. Gemma-4's module
    needs none."""
    of_head, of_draft = (
        configuration.scratch_slots(build(**arguments).speculative_config)
        for arguments in (head(), {})
    )
    assert of_head == of_draft - 1
    without = changed(build(**head()), "speculative_config.use_gemma4_mtp", lambda: True)
    assert configuration.scratch_slots(without.speculative_config) == 0


CHANGES: dict[str, tuple[str, Any]] = {
    "vocab_size (target, draft)": ("draft_model_config.model_arch_config.vocab_size", 127),
    "num_nextn_predict_layers, architecture": (
        "draft_model_config.hf_config.num_nextn_predict_layers",
        2,
    ),
    "use_local_argmax_reduction": ("use_local_argmax_reduction", True),
}

ASSISTANT = "Gemma-4's assistant, pipeline_parallel_size"
UNTYPED = "layers without a type in layer_types"
OF_STEP = {
    "architecture": "Step3p5MTP",
    "hf_config.num_hidden_layers": 2,
    "hf_config.num_nextn_predict_layers": 3,
    "hf_config.layer_types": ["full_attention"] * 2,
}


@pytest.mark.parametrize("option", CHANGES)
def test_one_change_is_refused_with_its_option_and_advice(
    build: Build, head: Arguments, option: str
) -> None:
    path, value = CHANGES[option]
    admitted = changed(build(**head()), "scheduler_config.scheduler_cls", None)
    reason = refusal_of(changed(admitted, f"speculative_config.{path}", value))
    (refusal,) = (each for each in heads.HEAD_REFUSALS if each.option == option)
    assert f"{option}=" in reason
    assert refusal.advice in reason


def test_modules_of_step_are_admitted_if_vllm_knows_the_types_of_their_layers(
    build: Build, head: Arguments
) -> None:
    """As vLLM 0.33 does. 0.32 cuts them off."""
    path = "speculative_config.draft_model_config"
    cut = build(**head())
    for name, value in OF_STEP.items():
        cut = changed(cut, f"{path}.{name}", value)
    assert f"{UNTYPED}=3 is not supported: vLLM 0.32 cannot" in refusal_of(cut)
    types = ["sliding_attention"] * 3
    assert UNTYPED not in refusal_of(changed(cut, f"{path}.hf_config.mtp_layer_types", types))


def test_an_assistant_is_refused_in_a_pipeline_alone(build: Build, head: Arguments) -> None:
    path = "speculative_config.target_parallel_config.pipeline_parallel_size"
    admitted = changed(build(**head()), "scheduler_config.scheduler_cls", None)
    assistant = changed(admitted, "speculative_config.use_gemma4_mtp", lambda: True)
    assert f"{ASSISTANT}=(True, 2)" in refusal_of(changed(assistant, path, 2))
    for each in (assistant, changed(admitted, path, 2)):
        admit(each)


def test_every_refusal_of_heads_is_tested() -> None:
    assert {each.option for each in heads.HEAD_REFUSALS} == {*CHANGES, UNTYPED, ASSISTANT}


def test_a_pool_of_a_head_and_a_draft_is_refused(build: Build, head: Arguments) -> None:
    with pytest.raises(ValueError, match="name one of them there, with method draft_model"):
        build(**head(), dyntree={"drafts": ["another"]})
