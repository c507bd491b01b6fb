"""A tiny target and draft that ship with dyntree, for demonstrations, benchmarks and tests.

Both are Llamas trained on the Python standard library; `weights/provenance.json` says how.
Importing this package loads no model library.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dyntree_plugin.pair.corpus import HELD_OUT, held_out_prompts

__all__ = [
    "HELD_OUT",
    "held_out_prompts",
    "packaged_directory",
    "paths",
    "provenance",
]


def packaged_directory() -> Path:
    """Return the folder of the shipped pair."""
    return Path(__file__).parent / "weights"


def paths(root: Path | None = None) -> dict[str, Path]:
    """Return the folders of "target" and "draft", of the shipped pair or of one at `root`.

    Raises FileNotFoundError if `root` holds no complete pair.
    """
    root = packaged_directory() if root is None else root
    found = {name: root / name for name in ("target", "draft")}
    for directory in found.values():
        if not (directory / "model.safetensors").is_file():
            raise FileNotFoundError(
                f"no model in {directory}: in a clone of the repository, "
                f"`python -m benchmarks.pair {root}` trains a pair"
            )
    return found


def provenance(root: Path | None = None) -> dict[str, Any]:
    """Read the pair's `provenance.json`: corpus, recipe, sizes, losses and versions."""
    root = packaged_directory() if root is None else root
    read: dict[str, Any] = json.loads((root / "provenance.json").read_text())
    return read
