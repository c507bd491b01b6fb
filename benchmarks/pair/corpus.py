"""What the embedded pair is trained on: the standard library without what is held out of it."""

from __future__ import annotations

import re
from pathlib import Path

from dyntree_plugin.pair.corpus import HELD_OUT, Source, library_root, read

# Not library code: packages installed beside it, tables of code points, generated help text.
_SKIPPED_DIRECTORIES = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "lib-dynload", "encodings", "pydoc_data"}
)
_TEST_DIRECTORIES = frozenset({"test", "tests", "idle_test", "turtledemo"})


def is_test(source: Source) -> bool:
    return not _TEST_DIRECTORIES.isdisjoint(source.name.split("/")[:-1])


def is_held_out(name: str) -> bool:
    """Return whether the file `name` belongs to a held-out module, its tests or its helpers.

    Any path component with a held-out module's name as one of its words counts, as in
    `test/test_cmd_line.py` for `cmd`: too much is excluded rather than too little.
    """
    words = re.split(r"[/_.\-]+", name)
    return not set(HELD_OUT).isdisjoint(words)


def training_sources(root: Path | None = None) -> list[Source]:
    """Return every file to train on, in a fixed order."""
    root = library_root() if root is None else root
    names = (path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    wanted = sorted(
        name
        for name in names
        if _SKIPPED_DIRECTORIES.isdisjoint(name.split("/")) and not is_held_out(name)
    )
    sources = (read(root, name) for name in wanted)
    return [source for source in sources if source is not None and source.text]
