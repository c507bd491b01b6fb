"""Check that pictures of a result can be drawn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from dyntree_plugin.commands.paths import check_new_folder


def check_plots(folder: Path | None) -> None:
    """Check that ``--plots`` can be served. Call it before anything is measured.

    Raises:
        ValueError: if a folder is given and matplotlib is not installed, or it cannot be made.
    """
    if folder is not None and find_spec("matplotlib") is None:
        raise ValueError(
            "--plots needs matplotlib: pip install 'vllm-dyntree[bench]', or leave --plots out"
        )
    check_new_folder("--plots", folder)
