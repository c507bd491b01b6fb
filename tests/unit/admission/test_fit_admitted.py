"""A draft is refused before weights load unless it fits its target and its method."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from configurations import EAGLE3, FLASH, LAGUNA, Build, drafting
from safetensors.torch import save_file

from dyntree_plugin.admission import reasons

Folder = Callable[..., str]
SPARK = FLASH | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 2}
WITH_MODULE: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_only_layers": [0, 1],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_nextn_predict_layers": 1,
}
PLAIN: dict[str, Any] = {}
LAYER: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""The layer of a draft for the tiny target."""


def speculator(kind: str = "eagle3", **changes: Any) -> dict[str, Any]:
    """Return what the file of a draft of the library speculators has."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    verifier = {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]}
    own = {"model_type": None, "architectures": ["ASpeculator"], "draft_vocab_size": 64}
    own |= {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "mask_token_id": 1}
    own |= {"speculators_model_type": kind, "aux_hidden_state_layer_ids": [1, 2]}
    own["speculators_config"] = {"proposal_methods": [proposal], "verifier": verifier}
    of_dflash = {"model_type": "qwen3"} if kind.startswith("dflash") else {}
    return own | {"transformer_layer_config": LAYER | of_dflash} | changes


def refused(build: Build, method: str | None, draft: object, **arguments: Any) -> str:
    with pytest.raises(ValueError) as error:
        build(**drafting(draft, method, 4), **arguments)
    assert reasons.is_refusal(error.value)
    (reason,) = reasons.of(error.value)
    assert len(reason) < 500
    return reason


def admitted(build: Build, method: str | None, draft: object, **arguments: Any) -> Any:
    return build(**drafting(draft, method, 4), **arguments).speculative_config


def eagle3(**changes: Any) -> dict[str, Any]:
    return EAGLE3 | changes


def flash(*layers: int, **options: Any) -> dict[str, Any]:
    return FLASH | {"dflash_config": {"target_layer_ids": [*layers], **options}}


NUMBERS = "eagle_aux_hidden_state_layer_ids"
WRONG = "its config.json has a wrong value "
SIZES = "hidden_size (target, draft)=(64, 32)"
MISFITS: list[tuple[str | None, dict[str, Any], str]] = [
    # Of another size.
    ("eagle", {"hidden_size": 32}, SIZES),
    ("eagle3", eagle3(hidden_size=32), SIZES),
    ("eagle3", eagle3(target_hidden_size=96), "target_hidden_size (target, draft)=(64, 96)"),
    (None, speculator(target_hidden_size=96), "use one with target_hidden_size 64"),
    ("eagle3", eagle3(hidden_size=32, pard_token=1), SIZES),
    ("dflash", FLASH | {"hidden_size": 32}, "use one with hidden_size 64"),
    ("dspark", SPARK | {"hidden_size": 32}, "use one with hidden_size 64"),
    ("dflash", LAGUNA | {"hidden_size": 32, "draft_vocab_size": 128}, "the target's embed_tokens"),
    # With layers that the target has not, or another number of states.
    ("eagle3", eagle3(**{NUMBERS: [0, 1, 3]}), f"{NUMBERS}=[0, 1, 3] is not supported: the target"),
    ("dflash", flash(2, mask_token_id=1), "the target has 2 layers"),
    ("eagle3", eagle3(**{NUMBERS: [1, 1, 2]}), "2 different hidden states, and the draft reads 3"),
    ("eagle3", eagle3(**{NUMBERS: None}), "the draft reads 3"),
    ("eagle3", eagle3(num_aux_hidden_states=2), "3 different hidden states, and the draft reads 2"),
    ("eagle3", eagle3(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state=False"),
    # With other tokens.
    ("eagle3", eagle3(draft_vocab_size=256), "draft_vocab_size (target, draft)=(128, 256)"),
    ("eagle3", eagle3(draft_vocab_size=0), "use one with 1 to 128"),
    ("dflash", LAGUNA, "it must be 128"),
    ("dflash", flash(0), "draft's mask token and vocabulary=(None, 128) is not supported"),
    # With values of another type.
    ("eagle3", eagle3(**{NUMBERS: "012"}), f"{WRONG}({NUMBERS}='012': "),
    ("eagle3", eagle3(eagle_config="none"), f"{WRONG}(eagle_config='none': "),
    ("eagle3", eagle3(num_aux_hidden_states="3"), "'3': Input should be a valid integer); get the"),
    ("eagle3", eagle3(hidden_size="64"), "Field 'hidden_size' expected int"),
    # Of another method.
    ("eagle3", PLAIN, "set method to 'draft_model'"),
    ("dflash", PLAIN, "set method to 'draft_model'"),
    ("draft_model", EAGLE3, "set method to 'eagle3'"),
    ("draft_model", speculator(), "set method to 'eagle3'"),
    ("eagle", EAGLE3, "set method to 'eagle3'"),
    ("mtp", EAGLE3, "set method to 'eagle3'"),
    ("draft_model", FLASH, "set method to 'dflash'"),
    ("mtp", PLAIN, "no module of multi-token prediction"),
    ("draft_model", {"architectures": ["NoSuchModel"]}, "architectures=['NoSuchModel']"),
    (None, speculator("eagle"), "speculators_model_type='eagle' must be one of"),
]
"""Methods and changes of the tiny target's file that make a draft for no such target, and what is
said."""


@pytest.mark.parametrize(("method", "changes", "said"), MISFITS)
def test_a_draft_that_does_not_fit_is_refused(
    build: Build, model_folder: Folder, method: str | None, changes: dict[str, Any], said: str
) -> None:
    assert said in refused(build, method, model_folder("draft", **changes))


def test_a_module_must_be_of_the_targets_size(build: Build, model_folder: Folder) -> None:
    target = model_folder("target", **WITH_MODULE)
    assert admitted(build, "mtp", None, model=target).method == "mtp"
    assert admitted(build, "mtp", target, model=target).method == "mtp"
    uncounted = {k: v for k, v in WITH_MODULE.items() if k != "num_nextn_predict_layers"}
    assert admitted(build, "mtp", None, model=model_folder("plain", **uncounted)).method == "mtp"
    other = model_folder("other", **WITH_MODULE | {"hidden_size": 128})
    assert "hidden_size (target, draft)=(64, 128)" in refused(build, "mtp", other, model=target)


@pytest.mark.parametrize(
    "changes",
    [
        PLAIN,
        WITH_MODULE | {"num_nextn_predict_layers": 0},
        {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"},
    ],
)
def test_a_target_without_a_module_is_no_module(
    build: Build, model_folder: Folder, changes: dict[str, Any]
) -> None:
    target = model_folder("target", **changes)
    assert "no module of multi-token prediction" in refused(build, "mtp", None, model=target)
    assert "no module of multi-token prediction" in refused(build, "mtp", target, model=target)


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("draft_model", EAGLE3, "a draft of method 'eagle3'; drafts beside the first must be"),
        ("draft_model", speculator(), "a draft of method 'eagle3'"),
        ("draft_model", WITH_MODULE, "a draft of method 'mtp'"),
    ],
)
def test_a_further_draft_must_be_a_draft_model(
    build: Build, model_folder: Folder, method: str, changes: dict[str, Any], said: str
) -> None:
    first, further = model_folder("first"), model_folder("further", **changes)
    reason = refused(build, method, first, dyntree={"drafts": [further]})
    assert f"dyntree.drafts, {further!r}: " in reason
    assert said in reason


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        (EAGLE3, "eagle3"),
        (speculator(), "eagle3"),
        (FLASH, "dflash"),
        (speculator("dflash", draft_vocab_size=128), "dflash"),
        (SPARK, "dspark"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        (WITH_MODULE, "mtp"),
        (PLAIN, "draft_model"),
    ],
)
def test_the_method_follows_from_the_file(
    build: Build, model_folder: Folder, changes: dict[str, Any], method: str
) -> None:
    model = model_folder("draft", **changes)
    target = {"model": model} if method == "mtp" else {}
    assert admitted(build, None, model, **target).method == method


def test_a_method_that_was_found_is_logged(
    build: Build, model_folder: Folder, logged: Callable[[], str]
) -> None:
    head = model_folder("draft", **speculator())
    admitted(build, None, head)
    assert f"{{'method': 'eagle3'}} follows from the config.json of {head}" in logged()
    masked = model_folder("draft", **speculator("peagle"))
    assert admitted(build, None, masked).method == "eagle3"
    assert "'parallel_drafting': True" in logged()


@pytest.mark.parametrize(("name", "method"), [("eagle3-x", "eagle3"), ("my-eagle-1", "eagle")])
def test_a_path_from_which_vllm_takes_another_method_is_refused(
    build: Build, model_folder: Folder, name: str, method: str
) -> None:
    model = model_folder(name)
    reason = refused(build, "draft_model", model)
    assert f"vLLM takes method {method!r} from its path; use another path" in reason
    named = model_folder(name, **FLASH)
    assert admitted(build, None, named).method == "dflash"


@pytest.mark.parametrize(("content", "said"), [(None, "has no config.json"), ("{", "is not JSON")])
def test_a_broken_file_is_named(
    build: Build, tmp_path: Path, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    reason = refused(build, None, str(tmp_path))
    assert said in reason
    assert str(tmp_path) in reason


def test_a_draft_that_is_not_there_is_named(build: Build) -> None:
    assert refused(build, None, "/nowhere/draft").endswith(
        "model='/nowhere/draft' is not a folder; name that of the draft"
    )


def with_weights(folder: str, *names: str) -> str:
    weights = {name: torch.zeros(1) for name in names}
    save_file(weights, Path(folder) / "model.safetensors", {"format": "pt"})
    return folder


WHOLE = ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight")
HEAD = ("fc.weight", "layers.0.input_layernorm.weight")


def test_weights_tell_heads_from_whole_models(build: Build, model_folder: Folder) -> None:
    """A head's file may have the class of a whole model."""
    whole, head = with_weights(model_folder("whole"), *WHOLE), model_folder("head")
    with_weights(head, *HEAD)
    assert admitted(build, "draft_model", whole).method == "draft_model"
    assert admitted(build, "eagle", head).method == "eagle"
    for method in ("eagle", "eagle3"):
        assert "no weight that joins hidden states" in refused(build, method, whole)
    assert "for a whole model set method" in refused(build, "eagle", whole, model=whole)
    assert "set method to 'eagle' or 'eagle3'" in refused(build, "draft_model", head)
    index = Path(model_folder("sharded"))
    (index / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(WHOLE, "not here")})
    )
    assert "no weight that joins" in refused(build, "eagle", str(index))


def test_a_head_of_its_own_size_has_its_own_embedding_and_output_layer(
    build: Build, model_folder: Folder
) -> None:
    """Heads of speculators and of gpt-oss are such: narrower than their targets."""
    own = EAGLE3 | {"hidden_size": 32, "target_hidden_size": 64}
    head = with_weights(model_folder("head", **own), *HEAD, "embed_tokens.weight", "lm_head.weight")
    assert admitted(build, "eagle3", head).method == "eagle3"
    assert admitted(build, "eagle3", model_folder("unknown", **own)).method == "eagle3"
    sharing = with_weights(model_folder("head", **own), *HEAD, "lm_head.weight")
    reason = refused(build, "eagle3", sharing)
    assert "hidden_size (target, draft)=(64, 32)" in reason
    assert "takes the target's embed_tokens" in reason


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_weights_that_cannot_be_read_are_named(
    build: Build, model_folder: Folder, content: bytes
) -> None:
    model = model_folder("draft")
    (Path(model) / "model.safetensors").write_bytes(content)
    reason = refused(build, "draft_model", model)
    assert f"model={model!r} is not supported: vLLM cannot read its files" in reason


PUBLISHED: dict[str, dict[str, Any]] = {
    # Of Llama and gpt-oss by EAGLE's authors and NVIDIA.
    "draft_vocab_size alone": {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 64},
    "eagle_config": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 64,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True},
    },
    "class first": {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": 128},
    "Qwen3": {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"},
    "speculators": speculator(target_hidden_size=64, eagle_aux_hidden_state_layer_ids=None),
}  # fmt: skip


@pytest.mark.parametrize("case", PUBLISHED)
def test_files_as_published_are_admitted_without_layers(
    build: Build, model_folder: Folder, case: str
) -> None:
    """vLLM has three layers by default, which differ in targets of more than 6 layers."""
    target = model_folder("target", num_hidden_layers=8)
    head = model_folder("head", **{"num_hidden_layers": 1} | PUBLISHED[case])
    assert admitted(build, "eagle3", head, model=target).method == "eagle3"
