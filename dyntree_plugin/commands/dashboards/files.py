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
)


def in_repository(root: Path) -> dict[str, Path]:
    """Return every file by its path below ``root``, the root of the repository."""
    paths = sorted(path for pattern in _PATTERNS for path in root.glob(pattern))
    return {path.relative_to(root).as_posix(): path for path in paths}


def installed() -> dict[str, Path]:
    """Return every file by its path in the repository.

    The files lie beside this module or, in an editable installation, in the repository.

    Raises:
        FileNotFoundError: if they lie in neither place.
    """
    here = Path(__file__)
    files = in_repository(here.with_name(BUNDLE)) or in_repository(here.parents[3])
    if not files:
        raise FileNotFoundError(f"this installation has no dashboards beside {here}: reinstall it")
    return files
