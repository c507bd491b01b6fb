"""What benchmarks keep between calls."""

from __future__ import annotations

import os
from pathlib import Path


def cached(name: str) -> Path:
    """Return the folder ``name`` in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dyntree" / name
