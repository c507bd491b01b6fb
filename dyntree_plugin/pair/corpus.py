"""The text of the embedded pair: the running interpreter's standard library.

A fixed list of modules is held out. Neither they nor their tests are ever trained on, so they
measure the models and supply the prompts of demonstrations and benchmarks.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HELD_OUT: tuple[str, ...] = (
    "bisect", "calendar", "cmd", "configparser", "fnmatch", "fractions", "getopt", "graphlib",
    "gzip", "heapq", "mailbox", "netrc", "plistlib", "pprint", "queue", "sched", "shelve",
    "shlex", "statistics", "tabnanny", "textwrap", "timeit", "trace", "wave", "zipapp",
)  # fmt: skip
"""Modules of every CPython from 3.10 to 3.13, present also in installations without tests."""

SHORTEST_DOCSTRING = 150
"""Fewest characters of a docstring that is long enough to be gone on with."""


@dataclass(frozen=True)
class Source:
    """One file: `name` is its path inside the library, with forward slashes."""

    name: str
    text: str


def library_root() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_sources(root: Path | None = None) -> list[Source]:
    """Return the held-out modules, in the order of `HELD_OUT`."""
    root = library_root() if root is None else root
    sources = []
    for module in HELD_OUT:
        source = read(root, f"{module}.py")
        if source is None:
            raise ValueError(f"root={str(root)!r} holds no readable {module}.py")
        sources.append(source)
    return sources


def held_out_prompts(
    count: int, *, seed: int = 0, characters: tuple[int, int] = (150, 300), root: Path | None = None
) -> list[str]:
    """Return prompts for code completion: spans of whole lines from the held-out modules.

    Each ends at the end of a non-blank line without its newline, where the tokenizer's boundary
    falls in running text too. The spans do not overlap, modules take turns, and the same `seed`
    gives the same prompts; a larger `count` extends the list of a smaller one.

    `characters` bounds the length: the default is 30 to 200 tokens of the pair's tokenizer.
    """
    low, high = characters
    if not 1 <= low <= high:
        raise ValueError(f"characters={characters} must be an ascending pair of positive lengths")
    spans = []
    for source in held_out_sources(root):
        generator = random.Random(f"{seed} {source.name}")
        found = _spans(source.text, low, high, generator)
        generator.shuffle(found)
        spans.append(found)
    return _in_turns(spans, count)


def held_out_docstrings(root: Path | None = None) -> list[list[str]]:
    """Return the docstrings of at least `SHORTEST_DOCSTRING` characters, by held-out module."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    return [
        [
            text
            for node in ast.walk(ast.parse(source.text))
            if isinstance(node, documented)
            and len(text := ast.get_docstring(node) or "") >= SHORTEST_DOCSTRING
        ]
        for source in held_out_sources(root)
    ]


def held_out_prose(
    count: int, *, seed: int = 0, characters: int = 300, root: Path | None = None
) -> list[str]:
    """Return the beginnings of held-out docstrings, as prompts for prose.

    They have whole words and at most this number of `characters`. Modules take turns, and the
    `seed` works as it does for `held_out_prompts`.
    """
    docstrings = held_out_docstrings(root)
    for number, found in enumerate(docstrings):
        random.Random(f"{seed} {number}").shuffle(found)
    begun = [[_whole_words(text, characters) for text in found] for found in docstrings]
    return _in_turns(begun, count)


def _in_turns(by_module: Sequence[Sequence[str]], count: int) -> list[str]:
    """Return the first `count` prompts if modules take turns."""
    longest = max(map(len, by_module))
    prompts = [found[turn] for turn in range(longest) for found in by_module if turn < len(found)]
    if not 0 <= count <= len(prompts):
        raise ValueError(f"count={count} must be 0 to {len(prompts)}: there are so many prompts")
    return prompts[:count]


def _whole_words(text: str, most: int) -> str:
    """Return the text up to the last word that ends within `most` characters."""
    return text if len(text) <= most else text[: most + 1].rsplit(maxsplit=1)[0]


def _spans(text: str, low: int, high: int, generator: random.Random) -> list[str]:
    """Return disjoint spans of whole lines, each `low` to `high` characters long."""
    found = []
    span, wanted = "", generator.randint(low, high)
    for line in text.splitlines(keepends=True):
        span = (span + line) if span.strip() else line
        stripped = span.rstrip()
        if len(stripped) > high:
            span, wanted = "", generator.randint(low, high)
        elif len(stripped) >= wanted and line.strip():
            found.append(stripped)
            span, wanted = "", generator.randint(low, high)
    return found


def read(root: Path, name: str) -> Source | None:
    """Read the file `name`; return None if it does not exist or is not UTF-8."""
    try:
        return Source(name, (root / name).read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError):
        return None
