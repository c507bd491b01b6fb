"""An environment with what the package requires, and nothing else: no vLLM, no PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def closure(requirements: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Return the installed distributions that requirements name, and those that these require.

    Extras of a requirement are left out, as are distributions that are not installed.
    """
    found: dict[str, metadata.Distribution] = {}
    wanted = [*requirements]
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        wanted += found[name].requires or ()
    return found


def parts(distribution: metadata.Distribution) -> Iterator[Path]:
    """Yield the files and folders of a distribution that lie in site-packages itself."""
    names = {path.parts[0] for path in distribution.files or () if path.parts[0] != ".."}
    yield from (Path(str(distribution.locate_file(name))) for name in sorted(names))


class Environment:
    """A folder with links to the distributions, which Python reads in place of site-packages.

    ``sources`` are folders with the package itself.
    """

    def __init__(self, folder: Path, sources: Iterable[Path] = (ROOT, ROOT / "kernels")) -> None:
        self.folder = folder
        self._path = [folder / "site", *sources]
        self._path[0].mkdir()
        for distribution in closure(PROJECT["dependencies"]).values():
            for part in parts(distribution):
                (self._path[0] / part.name).symlink_to(part)

    def python(self, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run Python in the folder; a traceback or another exit status is an error."""
        told = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "DYNTREE"))}
        told |= {"PYTHONPATH": os.pathsep.join(map(str, self._path)), "COLUMNS": "200"}
        done = subprocess.run(
            [sys.executable, "-S", *arguments],
            cwd=self.folder,
            env=told,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    def dyntree(self, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "dyntree_plugin.cli", *arguments, status=status)
