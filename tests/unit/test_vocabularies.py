"""Target and draft must give tokens the same meaning; their files are compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from dyntree_plugin import pair
from dyntree_plugin.admission import check, vocabularies

Write = Callable[..., Path]
TOKENS = {f"t{number}": number for number in range(8)}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a model's tokenizer; further tokens replace those of the vocabulary."""

    def make(name: str, vocabulary: object, **added: int) -> Path:
        (tmp_path / name).mkdir()
        more = [{"id": token, "content": text} for text, token in added.items()]
        file = tmp_path / name / "tokenizer.json"
        file.write_text(json.dumps({"added_tokens": more, "model": {"vocab": vocabulary}}))
        return file

    return make


def test_the_same_tokens_in_another_order_or_form_do_not_differ(write: Write) -> None:
    target = write("target", TOKENS)
    assert vocabularies.difference(target, write("same", TOKENS)) is None
    assert vocabularies.difference(target, write("turned", dict(reversed(TOKENS.items())))) is None
    assert vocabularies.difference(target, write("pairs", [[t, -1.0] for t in TOKENS])) is None
    assert vocabularies.difference(target, write("more", TOKENS, end=8)) is None


def test_tokens_of_another_meaning_are_counted_and_the_first_is_shown(write: Write) -> None:
    target, draft = write("target", TOKENS, end=8), write("draft", TOKENS, pad=8, other=5)
    found = vocabularies.difference(target, draft)
    assert found is not None
    assert str(found) == (
        "2 of 9 tokens differ, the first is 5, 't5' for the target and 'other' for the draft"
    )


def test_a_file_that_is_no_tokenizer_is_named(write: Write, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken.json is not a tokenizer file"):
        vocabularies.difference(write("target", TOKENS), tmp_path / "broken.json")


def test_a_tokenizer_is_looked_for_in_the_folder_and_in_the_cache_and_never_asked_for(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write("target", TOKENS)
    known = {"some/model": str(file), "other/model": None}
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda model, *_, **__: known[model]
    )
    assert vocabularies.tokenizer_file(str(file.parent), None) == file
    assert vocabularies.tokenizer_file(str(tmp_path), None) is None
    assert vocabularies.tokenizer_file("some/model", "main") == file
    assert vocabularies.tokenizer_file("other/model", None) is None


def test_what_is_no_name_of_a_repository_has_no_tokenizer_here() -> None:
    assert vocabularies.tokenizer_file("s3://bucket/model", None) is None


def config(target: Path | str, draft: Path | str) -> Any:
    named: Mapping[str, Any] = {"revision": None, "tokenizer_revision": None}
    return SimpleNamespace(
        model_config=SimpleNamespace(tokenizer=str(target), **named),
        speculative_config=SimpleNamespace(
            method="draft_model", draft_model_config=SimpleNamespace(model=str(draft), **named)
        ),
    )


def test_another_tokenizer_is_refused_and_other_reserved_tokens_are_warned_of(write: Write) -> None:
    target = write("target", TOKENS).parent
    reserved = config(target, write("reserved", TOKENS, other=7).parent)
    assert check._unlike_tokenizers(reserved) is None
    assert "1 of 8 tokens differ, the first is 7" in str(check.vocabulary_advice(reserved))

    other = {text: 7 - number for text, number in TOKENS.items()}
    stranger = config(target, write("stranger", other).parent)
    assert "8 of 8 tokens differ" in str(check._unlike_tokenizers(stranger))


@pytest.mark.parametrize("absent", ["target", "draft"])
def test_without_both_tokenizers_nothing_is_said(write: Write, tmp_path: Path, absent: str) -> None:
    folders = {"target": write("one", TOKENS).parent, "draft": write("other", {"x": 0}).parent}
    assert check._unlike_tokenizers(config(**folders)) is not None
    missing = config(**folders | {absent: tmp_path})
    assert check._unlike_tokenizers(missing) is check.vocabulary_advice(missing) is None


def test_the_embedded_pair_has_one_vocabulary() -> None:
    paths = pair.paths()
    found = config(paths["target"], paths["draft"])
    assert check._unlike_tokenizers(found) is check.vocabulary_advice(found) is None
