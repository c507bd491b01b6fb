"""Whether target and draft mean the same by a token, as far as their tokenizers' files tell.

A tree is matched token by token. Reads files of this machine and asks nobody; imports nothing of
vLLM.
"""

from __future__ import annotations

import filecmp
import json
from dataclasses import dataclass
from pathlib import Path

_FILE = "tokenizer.json"

MOST_OTHER = 0.5
"""Share of tokens from which on the tokenizers are not of one family. Models of one family differ
in reserved tokens; those of two share hardly a number."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Of ``common`` tokens that both know, ``other`` mean something else; the first is ``token``,
    with its text for the target and for the draft."""

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


def difference(target: Path, draft: Path) -> Difference | None:
    """What two ``tokenizer.json`` make of the same tokens; None where they agree."""
    if filecmp.cmp(target, draft, shallow=False):
        return None
    ours, theirs = _texts(target), _texts(draft)
    common = sorted(ours.keys() & theirs.keys())
    other = [token for token in common if ours[token] != theirs[token]]
    if not other:
        return None
    return Difference(len(other), len(common), other[0], (ours[other[0]], theirs[other[0]]))


def tokenizer_file(model: str, revision: str | None) -> Path | None:
    """A model's ``tokenizer.json`` in its folder or in Hugging Face's cache, or None where it has
    none or it is not on this machine."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    folder = Path(model)
    if folder.is_dir():
        return folder / _FILE if (folder / _FILE).is_file() else None
    try:
        found = try_to_load_from_cache(model, _FILE, revision=revision)
    except HFValidationError:
        return None  # No name of theirs, as that of an object store.
    return Path(found) if isinstance(found, str) else None


def _texts(file: Path) -> dict[int, str]:
    """Every token's text; none of a form that is not known."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is no tokenizer: {error}") from None
    vocabulary = content.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram's: pairs of text and score.
        texts = {token: str(pair[0]) for token, pair in enumerate(vocabulary)}
    else:
        texts = {token: text for text, token in vocabulary.items()}
    added = {each["id"]: each["content"] for each in content.get("added_tokens", ())}
    return texts | added
