"""Prompts of several kinds, made from held-out code, and for some of them the text that follows.

The embedded target writes code, but it is too small to copy from its context as large models do.
So the workloads that copy come with the text that a model would write there, at temperature 0.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, zip_longest

from dyntree_plugin.pair import held_out_prompts
from dyntree_plugin.pair.corpus import held_out_docstrings


@dataclass(frozen=True)
class Texts:
    """Prompts, and ``given``: what follows each of them; None if the target is to write it."""

    prompts: list[str]
    given: list[str] | None = None

    def part(self, rows: slice) -> Texts:
        """Return some of the texts."""
        return Texts(self.prompts[rows], None if self.given is None else self.given[rows])


def code(count: int) -> Texts:
    """Return held-out code to go on with."""
    return Texts(held_out_prompts(count))


def prose(count: int) -> Texts:
    """Return docstrings of held-out modules to go on with."""
    return Texts([text[:300] for text in _passages(count)])


def edit(count: int) -> Texts:
    """Return files, and each file again with its most frequent name changed."""
    files = held_out_prompts(count, characters=(700, 1300), seed=1)
    asked = "\n\n\n# The same with another name\n\n"
    return Texts([file + asked for file in files], [_renamed(file) for file in files])


def retrieval(count: int) -> Texts:
    """Return three passages and a question each, and an answer that quotes most of them."""
    passages = _passages(count)
    prompts, answers = [], []
    for at in range(count):
        found = [passages[(at + more) % count][:400] for more in range(3)]
        sources = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(found, start=1))
        prompts.append(f"{sources}\n\nQuestion: what do these passages say?\nAnswer: ")
        quotes = (
            f"passage {number} says: {text}"
            for number, text in zip((3, 2, 1), found[::-1], strict=True)
        )
        answers.append("In short, " + ". Then, ".join(quotes))
    return Texts(prompts, answers)


def conversation(count: int) -> Texts:
    """Return a message each, and an answer that quotes it line by line and comments on it."""
    passages = _passages(count)
    prompts, answers = [], []
    for at in range(count):
        message, comments = passages[at][:600], passages[at - 1][:300]
        prompts.append(f"A wrote:\n{message}\n\nB answers:\n")
        lines = zip_longest(message.splitlines(), comments.splitlines())
        said = (f"> {quoted or ''}\n{own or 'Yes.'}" for quoted, own in lines)
        answers.append("\n".join(said))
    return Texts(prompts, answers)


WORKLOADS: dict[str, Callable[[int], Texts]] = {
    "code": code,
    "prose": prose,
    "edit": edit,
    "retrieval": retrieval,
    "conversation": conversation,
}


def _passages(count: int) -> list[str]:
    """Return docstrings of held-out modules, of some length.

    Raises:
        ValueError: if there are fewer.
    """
    found = list(chain.from_iterable(held_out_docstrings()))
    if len(found) < count:
        raise ValueError(
            f"the workload has {len(found)} prompts; --num-prompts and --calibration ask for "
            f"{count}"
        )
    return found[:count]


def _renamed(file: str) -> str:
    """Return code with its most frequent name changed."""
    words = re.findall(r"\b[a-z_]\w+\b", file)
    names = Counter(word for word in words if not keyword.iskeyword(word))
    name, _ = names.most_common(1)[0]
    return re.sub(rf"\b{name}\b", f"new_{name}", file)
