"""A tiny target and draft that ship with dyntree, for demonstrations, benchmarks and tests.

Both are Llamas trained on the Python standard library; `weights/provenance.json` says how.
Importing this package loads no model library.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyntree_plugin.pair.corpus import HELD_OUT, held_out_prompts

if TYPE_CHECKING:
    from dyntree_plugin.pair.train import Recipe

__all__ = [
    "HELD_OUT",
    "held_out_prompts",
    "packaged_directory",
    "paths",
    "provenance",
    "retrain",
    "user_directory",
]


def packaged_directory() -> Path:
    """Where the shipped pair lies."""
    return Path(__file__).parent / "weights"


def user_directory() -> Path:
    """Where `retrain` writes unless told otherwise."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "dyntree" / "pair"


def paths(root: Path | None = None) -> dict[str, Path]:
    """The model directories, under "target" and "draft", of the shipped pair or of one at `root`.

    Raises FileNotFoundError if `root` holds no complete pair.
    """
    root = packaged_directory() if root is None else root
    found = {name: root / name for name in ("target", "draft")}
    for directory in found.values():
        if not (directory / "model.safetensors").is_file():
            raise FileNotFoundError(f"no model in {directory}; `dyntree pair --retrain` makes one")
    return found


def provenance(root: Path | None = None) -> dict[str, Any]:
    """What `provenance.json` says of the pair: corpus, recipe, sizes, losses and versions."""
    root = packaged_directory() if root is None else root
    read: dict[str, Any] = json.loads((root / "provenance.json").read_text())
    return read


def retrain(
    output: Path | None = None,
    recipe: Recipe | None = None,
    *,
    checkpoints: Path | None = None,
) -> dict[str, Path]:
    """Train a pair on the running interpreter's library; its paths, as from `paths`.

    `output` defaults to `user_directory()`, `recipe` to the one of the shipped pair, which takes
    about half an hour on two idle cores. With `checkpoints` an interrupted training resumes.
    """
    from dyntree_plugin.pair.build import build
    from dyntree_plugin.pair.train import Recipe

    output = user_directory() if output is None else output
    build(output, Recipe() if recipe is None else recipe, checkpoints=checkpoints)
    return paths(output)
