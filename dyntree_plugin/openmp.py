"""Intel's OpenMP runtime for vLLM's CPU engine.

vLLM's CPU build installs the library, but preloads PyTorch's slower one unless the user sets
``LD_PRELOAD``. A process can load it only when it starts.
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
    """Return the library of this environment, or None if there is none, as on ARM."""
    try:
        files = metadata.files("intel-openmp")
    except metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files or () if file.name == _LIBRARY]
    return next((path.resolve() for path in paths if path.exists()), None)


def loaded() -> bool:
    """Return whether this process has loaded the library."""
    maps = Path("/proc/self/maps")
    return maps.exists() and "libiomp5" in maps.read_text()


def set_for_children() -> None:
    """Let every child process load the library, unless the user has chosen another.

    The variable stays in the environment, because an engine may start processes at any time.
    """
    path = library()
    entries = [entry for entry in os.environ.get(_VARIABLE, "").split(":") if entry]
    # vLLM's CPU platform adds PyTorch's own library; any other one is the user's choice.
    entries = [entry for entry in entries if "/torch/lib/libgomp" not in entry]
    if path is None or any(name in e for e in entries for name in ("libiomp", "libomp", "libgomp")):
        return
    os.environ[_VARIABLE] = ":".join([str(path), *entries])


def restart_with_library() -> None:
    """Restart this process with the library loaded, if vLLM is a CPU build.

    For other builds the library makes no difference; another package may have installed it.
    """
    if not versions.is_cpu_build() or loaded() or library() is None:
        return
    before = os.environ.get(_VARIABLE)
    set_for_children()
    if os.environ.get(_VARIABLE) != before:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
