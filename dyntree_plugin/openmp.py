"""Intel's OpenMP runtime for vLLM's CPU engine.

vLLM's CPU build brings the library along, but preloads PyTorch's slower one unless the user sets
``LD_PRELOAD``. A process takes it up only when it starts.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

from dyntree_plugin.admission import versions

_VARIABLE = "LD_PRELOAD"
_LIBRARY = "libiomp5.so"


def library() -> Path | None:
    """The library that belongs to this environment, or None where there is none (not x86)."""
    try:
        files = metadata.files("intel-openmp")
    except metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files or () if file.name == _LIBRARY]
    return next((path.resolve() for path in paths if path.exists()), None)


def loaded() -> bool:
    """Whether this process runs with the library."""
    maps = Path("/proc/self/maps")
    return maps.exists() and "libiomp5" in maps.read_text()


def set_for_children() -> None:
    """Has every process that starts from here on load the library, unless the user chose one.

    It stays in the environment: an engine's processes may start at any time.
    """
    path = library()
    entries = [entry for entry in os.environ.get(_VARIABLE, "").split(":") if entry]
    # PyTorch's own is what vLLM's CPU platform adds by itself; any other is the user's choice.
    entries = [entry for entry in entries if "/torch/lib/libgomp" not in entry]
    if path is None or any(name in e for e in entries for name in ("libiomp", "libomp", "libgomp")):
        return
    os.environ[_VARIABLE] = ":".join([str(path), *entries])


def restart_with_library() -> None:
    """Replaces this process by itself with the library loaded, where that changes anything: with a
    CPU build of vLLM. The library may have come with something else."""
    if not versions.is_cpu_build() or loaded() or library() is None:
        return
    before = os.environ.get(_VARIABLE)
    set_for_children()
    if os.environ.get(_VARIABLE) != before:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
