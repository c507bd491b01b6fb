"""Check whether a token id has the same text for target and draft.

This module reads local files only, and imports nothing of vLLM.
"""

from __future__ import annotations

import filecmp
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_FILE = "tokenizer.json"
_USE_ANOTHER = "use a draft with the target's vocabulary"

UNLIKE_SHARE = 0.5
"""From this share of differing tokens on, tokenizers belong to different families. Models of one
family differ in reserved tokens only; models of two families agree on hardly any token."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Of ``common`` tokens that two tokenizers have, ``other`` have different texts.

    ``token`` is the first of these, and ``texts`` are its texts for target and draft.
    """

    other: int
    common: int
    token: int
    texts: tuple[str, str]

    @property
    def share(self) -> float:
        return self.other / self.common

    def __str__(self) -> str:
        return (
            f"{self.other} of {self.common} tokens differ, the first is {self.token}, "
            f"{self.texts[0]!r} for the target and {self.texts[1]!r} for the draft"
        )


def unlike(target: ModelConfig, draft: ModelConfig) -> str | None:
    """Say that two models' tokenizers are of different families; None if they are not."""
    difference = differing(target, draft)
    if difference is None or difference.share < UNLIKE_SHARE:
        return None
    return (
        "target and draft have different tokenizers, so the target would accept hardly any token "
        f"of the draft: {difference}; {_USE_ANOTHER}"
    )


def other_size(target: ModelConfig, draft: ModelConfig) -> str | None:
    """Say why a draft model's embedding must have the target's size.

    Returns None if the tokenizers give their common tokens the same texts: then one of the models
    is only padded to another size.
    """
    sizes = target.get_vocab_size(), draft.get_vocab_size()
    if sizes[0] == sizes[1]:
        return None
    advice = _USE_ANOTHER if unlike(target, draft) else _unproven(target, draft)
    return advice and f"vocab_size (target, draft)={sizes} is not supported: {advice}"


def differing(target: ModelConfig, draft: ModelConfig) -> Difference | None:
    """Compare two models' tokenizers; None if they agree, or one is not on this machine."""
    ours, theirs = _files(target, draft)
    return difference(ours, theirs) if ours and theirs else None


def padding(target: ModelConfig, draft: ModelConfig) -> str | None:
    """Describe the sizes of an admitted pair's embeddings; None if they are equal."""
    sizes = target.get_vocab_size(), draft.get_vocab_size()
    if sizes[0] == sizes[1]:
        return None
    return (
        f"The embeddings of target and draft have {sizes[0]} and {sizes[1]} tokens, and their "
        f"tokenizers agree: the draft proposes only the first {min(sizes)}."
    )


def difference(target: Path, draft: Path) -> Difference | None:
    """Compare two ``tokenizer.json``; None if they agree."""
    if filecmp.cmp(target, draft, shallow=False):
        return None
    ours, theirs = _texts(target), _texts(draft)
    common = sorted(ours.keys() & theirs.keys())
    other = [token for token in common if ours[token] != theirs[token]]
    if not other:
        return None
    return Difference(len(other), len(common), other[0], (ours[other[0]], theirs[other[0]]))


def _unproven(target: ModelConfig, draft: ModelConfig) -> str | None:
    """Say what to do if the files do not show that one of two models is only padded; else None.

    The two are not `unlike`.
    """
    ours, theirs = _files(target, draft)
    if ours is not None and theirs is not None:
        if _have_common_tokens(ours, theirs):
            return None
        return f"the {_FILE} of the two have no token in common; {_USE_ANOTHER}"
    models = {target.tokenizer: ours, draft.model: theirs}
    without = " and ".join(repr(model) for model, file in models.items() if file is None)
    return (
        f"to check whether one of the two is only padded, a {_FILE} of {without} must be on this "
        "machine; save it in the model's folder, or resize the draft to the target's size with "
        "transformers' resize_token_embeddings"
    )


def _files(target: ModelConfig, draft: ModelConfig) -> tuple[Path | None, Path | None]:
    ours = target.tokenizer and tokenizer_file(target.tokenizer, target.tokenizer_revision)
    return ours or None, tokenizer_file(draft.model, draft.revision)


def _have_common_tokens(target: Path, draft: Path) -> bool:
    if filecmp.cmp(target, draft, shallow=False):
        return True
    return not _texts(target).keys().isdisjoint(_texts(draft))


def tokenizer_file(model: str, revision: str | None) -> Path | None:
    """Return a model's ``tokenizer.json``, from its folder or Hugging Face's cache, or None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    folder = Path(model)
    if folder.is_dir():
        return folder / _FILE if (folder / _FILE).is_file() else None
    try:
        file = try_to_load_from_cache(model, _FILE, revision=revision)
    except HFValidationError:
        return None  # Not a name of Hugging Face's; perhaps an object store's.
    return Path(file) if isinstance(file, str) else None


def _texts(file: Path) -> dict[int, str]:
    """Return every token's text by its id; none for a file without a vocabulary.

    Raises:
        ValueError: if the file is not a tokenizer of Hugging Face's format.
    """
    try:
        content = json.loads(file.read_bytes())
        vocabulary = content.get("model", {}).get("vocab", {})
        if isinstance(vocabulary, list):  # A Unigram tokenizer has pairs of text and score.
            texts = {token: pair[0] for token, pair in enumerate(vocabulary)}
        else:
            texts = {token: text for text, token in vocabulary.items()}
        texts |= {each["id"]: each["content"] for each in content.get("added_tokens", ())}
        if not all(isinstance(i, int) and isinstance(text, str) for i, text in texts.items()):
            raise TypeError
    except ValueError as error:
        reason = str(error)
    except (TypeError, AttributeError, LookupError, RecursionError):
        reason = "model.vocab and added_tokens must be lists or objects of tokens"
    else:
        return texts
    raise ValueError(f"{file} is not a tokenizer file: {reason}; get the model again")
