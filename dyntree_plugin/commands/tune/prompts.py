"""Read the user's prompts, and check them before a model loads."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyntree_plugin.commands.loads import chat as chats
from dyntree_plugin.commands.loads.prompt_file import SAMPLING, lines

FEWEST = 8
"""Prompts of each kind: to learn from, and to measure with."""

STRANGE = 0.9
"""From this number of tokens per byte on, a tokenizer hardly knows a text."""


@dataclass(frozen=True)
class Prompts:
    """Prompts as tokens: those ``held_out`` from learning, and those to ``learn`` from."""

    held_out: list[list[int]]
    learn: list[list[int]]
    digest: str
    notes: list[str]

    @property
    def longest(self) -> int:
        return max(map(len, [*self.held_out, *self.learn]))


def read(path: Path, tokenizer: Any, most: int, held_out: int, seed: int, *, chat: bool) -> Prompts:
    """Read a JSONL file, shuffle its prompts by the ``seed``, and hold some out.

    With ``chat`` each prompt becomes a user's message in the model's chat template.

    Raises:
        ValueError: if the file or a line of it is invalid, or has sampling parameters. A prompt
            must have 1 to ``most`` tokens.
    """
    requests = lines(path)
    # By the first of equal ones, which could be both learned and held out.
    numbers: dict[str, int] = {}
    for number, request in enumerate(requests, start=1):
        numbers.setdefault(str(request.prompt), number)
        if request.sampling:
            raise ValueError(
                f"--prompts {str(path)!r}: prompt {number} has {SAMPLING}, which is for dyntree "
                "bench serve: leave it out, and give --temperature"
            )
    texts, notes = [*numbers], []
    if dropped := len(requests) - len(texts):
        notes.append(f"{dropped} of the prompts are equal to others, and left out.")
    if len(texts) < FEWEST + held_out:
        raise ValueError(
            f"--prompts {str(path)!r} has {len(texts)} prompts that differ: it must have at least "
            f"{FEWEST}, and {held_out} more to hold out (--held-out)"
        )
    encoded = chats.encoded(texts, tokenizer, chat=chat)
    for number, tokens in zip(numbers.values(), encoded, strict=True):
        if not 0 < len(tokens) <= most:
            raise ValueError(
                f"--prompts {str(path)!r}: prompt {number} has {len(tokens)} tokens; with "
                f"--max-tokens and the trees it may have 1 to {most}"
            )
    digest = hashlib.sha256(json.dumps(encoded).encode()).hexdigest()
    share = sum(map(len, encoded)) / max(1, sum(len(text.encode()) for text in texts))
    if share >= STRANGE:
        notes.append(
            f"The tokenizer takes {share:.2f} tokens per byte of the prompts: it hardly knows "
            "their language or their format."
        )
    random.Random(seed).shuffle(encoded)
    return Prompts(encoded[:held_out], encoded[held_out:], digest, notes)
