"""Target and draft must give tokens the same meaning; their files are compared."""

from __future__ import annotations

import json
from collections.abc import Callable
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


@pytest.mark.parametrize(
    "content",
    [
        *(None, {"added_tokens": [{"id": 5, "content": None}]}),
        *({"model": {"vocab": value}} for value in ([[]], {"a": "b"})),
    ],
)
def test_a_part_of_a_tokenizer_that_has_another_type_is_refused(
    content: object, write: Write, tmp_path: Path
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer file: .*get the mod"):
        vocabularies.difference(write("target", TOKENS), file)


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


def model(name: Path | str, size: int = 8) -> Any:
    """Return what is read of a ModelConfig."""
    return SimpleNamespace(
        model=str(name),
        tokenizer=str(name),
        revision=None,
        tokenizer_revision=None,
        get_vocab_size=lambda: size,
    )


def config(target: Path | str, draft: Path | str) -> Any:
    return SimpleNamespace(
        model_config=model(target),
        speculative_config=SimpleNamespace(method="draft_model", draft_model_config=model(draft)),
    )


def test_another_tokenizer_is_refused_and_other_reserved_tokens_are_warned_of(write: Write) -> None:
    target = write("target", TOKENS).parent
    reserved = write("reserved", TOKENS, other=7).parent
    assert vocabularies.unlike(model(target), model(reserved)) is None
    advice = check.vocabulary_advice(config(target, reserved))
    assert "1 of 8 tokens differ, the first is 7" in str(advice)

    other = {text: 7 - number for text, number in TOKENS.items()}
    stranger = write("stranger", other).parent
    assert "8 of 8 tokens differ" in str(vocabularies.unlike(model(target), model(stranger)))


@pytest.mark.parametrize("padded", [(8, 10), (10, 8)])
def test_another_size_is_admitted_where_the_tokenizers_show_that_it_is_padding(
    write: Write, tmp_path: Path, padded: tuple[int, int]
) -> None:
    target, draft = write("target", TOKENS), write("draft", TOKENS, end=8)

    def refusal(ours: Path, theirs: Path) -> str | None:
        return vocabularies.other_size(model(ours, padded[0]), model(theirs, padded[1]))

    assert refusal(target.parent, draft.parent) is None
    named = f"vocab_size (target, draft)={padded} is not supported: "
    for folders in ((tmp_path, draft.parent), (target.parent, tmp_path)):
        missing = str(refusal(*folders))
        assert missing.startswith(named)
        assert f"a tokenizer.json of '{tmp_path}' must be on this machine" in missing
    strangers = write("stranger", {text: 7 - number for text, number in TOKENS.items()})
    assert refusal(target.parent, strangers.parent) == (
        f"{named}use a draft with the target's vocabulary"
    )
    assert "no token in common" in str(refusal(target.parent, write("unknown", {}).parent))


def test_the_embedded_pair_has_one_vocabulary() -> None:
    paths = pair.paths()
    found = config(paths["target"], paths["draft"])
    assert vocabularies.unlike(model(paths["target"]), model(paths["draft"])) is None
    assert check.vocabulary_advice(found) is check.padding_advice(found) is None
