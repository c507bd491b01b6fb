"""Compare the tokenizers of target and draft: does a token id mean the same text for both?

Trees are matched token by token. This module reads local files only; it never uses the network,
and it imports nothing of vLLM.
"""

from __future__ import annotations

import filecmp
import json
from dataclasses import dataclass
from pathlib import Path

_FILE = "tokenizer.json"

UNLIKE_SHARE = 0.5
"""With this share of differing tokens or more, two tokenizers belong to different families. Models
of one family differ in reserved tokens only; models of two families agree on hardly any token."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The tokens that two tokenizers read differently.

    ``common`` tokens are in both, and ``other`` of them have different texts. ``token`` is the
    first of these, and ``texts`` are its texts for the target and for the draft.
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


def difference(target: Path, draft: Path) -> Difference | None:
    """Compare the tokens of two ``tokenizer.json``; return None if they agree."""
    if filecmp.cmp(target, draft, shallow=False):
        return None
    ours, theirs = _texts(target), _texts(draft)
    common = sorted(ours.keys() & theirs.keys())
    other = [token for token in common if ours[token] != theirs[token]]
    if not other:
        return None
    return Difference(len(other), len(common), other[0], (ours[other[0]], theirs[other[0]]))


def tokenizer_file(model: str, revision: str | None) -> Path | None:
    """Find a model's ``tokenizer.json`` in its folder or in Hugging Face's cache.

    Returns None if there is none on this machine.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    folder = Path(model)
    if folder.is_dir():
        return folder / _FILE if (folder / _FILE).is_file() else None
    try:
        found = try_to_load_from_cache(model, _FILE, revision=revision)
    except HFValidationError:
        return None  # The name is not one of Hugging Face's; it may be an object store's.
    return Path(found) if isinstance(found, str) else None


def _texts(file: Path) -> dict[int, str]:
    """Return every token's text by its id; none for a file of an unknown form."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not a tokenizer file: {error}") from None
    vocabulary = content.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # A Unigram tokenizer has pairs of text and score.
        texts = {token: str(pair[0]) for token, pair in enumerate(vocabulary)}
    else:
        texts = {token: text for text, token in vocabulary.items()}
    added = {each["id"]: each["content"] for each in content.get("added_tokens", ())}
    return texts | added
