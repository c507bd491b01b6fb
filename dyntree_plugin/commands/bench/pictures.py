"""What pictures of a result need."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def check_plots(folder: Path | None) -> None:
    """Whether what ``--plots`` asks for can be drawn; to be called before anything is measured.

    Raises:
        ValueError: if a folder is given and matplotlib is not installed.
    """
    if folder is not None and find_spec("matplotlib") is None:
        raise ValueError(
            "--plots needs matplotlib: pip install 'dyntree[bench]', or leave --plots out"
        )
