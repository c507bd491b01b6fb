"""The files that `dyntree dashboards` writes. setup.py copies them into the wheel."""

from __future__ import annotations

from pathlib import Path

BUNDLE = "bundle"
"""Name of the folder beside this module where the wheel has the files."""

_PATTERNS = (
    "grafana/compose.yaml",
    "grafana/dashboards/*.json",
    "grafana/prometheus/*.yml",
    "grafana/provisioning/*/*.yaml",
    "examples/deployment/*.yaml",
)
_OF_SOURCES = {"examples/deployment/compose.yaml"}
"""Files that are of no use without the repository: this one builds an image from it."""


def in_repository(root: Path) -> dict[str, Path]:
    """Return every file by its path below ``root``, the root of the repository."""
    found = sorted(path for pattern in _PATTERNS for path in root.glob(pattern))
    named = {path.relative_to(root).as_posix(): path for path in found}
    return {name: path for name, path in named.items() if name not in _OF_SOURCES}


def installed() -> dict[str, Path]:
    """Return every file by its path in the repository.

    They lie beside this module, or in the repository if the package is installed from it as
    editable.

    Raises:
        FileNotFoundError: if they lie in neither place.
    """
    here = Path(__file__)
    found = in_repository(here.with_name(BUNDLE)) or in_repository(here.parents[3])
    if not found:
        raise FileNotFoundError(f"this installation has no dashboards beside {here}: reinstall it")
    return found
