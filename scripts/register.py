"""Lets vLLM find a plugin that is not installed, from a folder to be put on PYTHONPATH.

    python scripts/register.py FOLDER

vLLM looks plugins up among the entry points of installed packages. Where the package is on
PYTHONPATH alone, a folder with its metadata serves as well. Does nothing where it is installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(folder: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, groups = project["name"], project["entry-points"]
    if all(
        metadata.entry_points(group=group, name=key) for group in groups for key in groups[group]
    ):
        return
    source = (ROOT / "dyntree_plugin" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    if found is None:
        sys.exit("dyntree_plugin/__init__.py names no __version__")
    # Of a folder's name, all before the first hyphen is taken for the distribution's.
    written = Path(folder) / f"{name.replace('-', '_')}-{found[1]}.dist-info"
    written.mkdir(parents=True, exist_ok=True)
    (written / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {found[1]}\n")
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (written / "entry_points.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
