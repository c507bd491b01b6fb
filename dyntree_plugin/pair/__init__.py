"""A tiny target and drafts that ship with dyntree, for demonstrations, benchmarks and tests.

The target and two drafts are Llamas, "eagle3" is an EAGLE-3 head of the target and "dflash" a block
draft for it. All were trained on the Python standard library; `weights/provenance.json` says how.
Importing this package loads no model library.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dyntree_plugin.pair.corpus import HELD_OUT, held_out_prompts, held_out_prose

__all__ = [
    "HELD_OUT",
    "held_out_prompts",
    "held_out_prose",
    "packaged_directory",
    "paths",
    "provenance",
    "target_and_draft",
]


_MODELS = ("target", "draft", "second_draft", "eagle3", "dflash")


def packaged_directory() -> Path:
    """Return the folder of the shipped pair."""
    return Path(__file__).parent / "weights"


def paths(root: Path | None = None) -> dict[str, Path]:
    """Return the folders of the target and of what drafts for it, by name, shipped or at `root`.

    Another pair may lack all but "target" and "draft"; then the result lacks them, too.

    Raises FileNotFoundError if `root` holds no complete pair.
    """
    root = packaged_directory() if root is None else root
    every = {name: root / name for name in _MODELS}
    found = {name: path for name, path in every.items() if (path / "model.safetensors").is_file()}
    for name in ("target", "draft"):
        if name not in found:
            raise FileNotFoundError(
                f"no model in {every[name]}: in a clone of the repository, "
                f"`python -m benchmarks.pair {root}` trains a pair"
            )
    return found


def target_and_draft() -> tuple[str, str]:
    """Return the folders of the shipped target and of its first draft."""
    found = paths()
    return str(found["target"]), str(found["draft"])


def provenance(root: Path | None = None) -> dict[str, Any]:
    """Read the pair's `provenance.json`: corpus, recipe, sizes, losses and versions."""
    root = packaged_directory() if root is None else root
    read: dict[str, Any] = json.loads((root / "provenance.json").read_text())
    return read
