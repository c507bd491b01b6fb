"""Drafts of another vocabulary are refused, unless it is only padded to another size."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from configurations import Build

from dyntree_plugin.admission import reasons


def test_a_draft_with_another_vocabulary_is_refused(
    build: Build, model_folder: Callable[..., str]
) -> None:
    other = model_folder("other", vocab_size=64)
    for more in ({}, {"use_heterogeneous_vocab": True}):
        with pytest.raises(ValueError, match=r"vocab_size \(target, draft\)=\(128, 64\)") as error:
            build(speculative={"model": other} | more, enable_prompt_embeds=True)
        assert "enable_prompt_embeds=True" in str(error.value)
    with pytest.raises(ValueError, match="should have the same vocabulary size") as error:
        build(speculative={"model": other}, additional_config={})
    assert "target, draft" not in str(error.value)


def with_tokenizer(folder: str, prefix: str) -> str:
    """Give a model the tokenizer whose texts begin with the ``prefix``; return its folder."""
    content = {"model": {"vocab": {f"{prefix}{token}": token for token in range(60)}}}
    (Path(folder) / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_a_first_or_further_draft_with_another_tokenizer_is_refused(
    build: Build, model_folder: Callable[..., str]
) -> None:
    one, other = (with_tokenizer(model_folder(name), name) for name in ("one", "other"))
    build(model=one, speculative={"model": one}, dyntree={"drafts": [one]})
    for drafts in (
        {"speculative": {"model": other}},
        {"speculative": {"model": one}, "dyntree": {"drafts": [other]}},
    ):
        with pytest.raises(ValueError, match=r"different tokenizers.* 60 of 60 tokens differ"):
            build(model=one, **drafts)


@pytest.mark.parametrize("size", [64, 256])
def test_a_draft_that_is_only_padded_to_another_size_is_admitted(
    build: Build, model_folder: Callable[..., str], logged: Callable[[], str], size: int
) -> None:
    target = with_tokenizer(model_folder("whole"), "t")
    draft = with_tokenizer(model_folder("padded", vocab_size=size), "t")
    build(model=target, speculative={"model": draft}, dyntree={"drafts": [draft]})
    told = f"have 128 and {size} tokens, and their tokenizers agree"
    assert logged().count(told) == 2
    build(model=target, speculative={"model": target})
    assert "tokenizers agree" not in logged()


def test_a_draft_of_another_size_and_tokenizer_is_refused_with_two_reasons(
    build: Build, model_folder: Callable[..., str]
) -> None:
    target = with_tokenizer(model_folder("ours"), "t")
    draft = with_tokenizer(model_folder("theirs", vocab_size=64), "d")
    with pytest.raises(ValueError) as error:
        build(model=target, speculative={"model": draft})
    assert [reason.partition("=")[0][:35] for reason in reasons.of(error.value)] == [
        "vocab_size (target, draft)",
        "target and draft have different tok",
    ]


def test_a_worker_may_derive_a_configuration_from_that_of_a_padded_draft(
    build: Build, model_folder: Callable[..., str]
) -> None:
    from vllm.config import replace

    target = with_tokenizer(model_folder("first"), "t")
    draft = with_tokenizer(model_folder("second", vocab_size=256), "t")
    config = pickle.loads(pickle.dumps(build(model=target, speculative={"model": draft})))
    of_draft = replace(config, model_config=config.speculative_config.draft_model_config)
    assert of_draft.model_config.get_vocab_size() == 256
