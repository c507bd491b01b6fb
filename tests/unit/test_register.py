"""vLLM finds the plugin without an installation; files are written only if it is not installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from dyntree_plugin import __version__

ROOT = Path(__file__).parents[2]


def register(folder: Path, *flags: str, path: Path = ROOT / "tests") -> None:
    """Run the script; ``flags`` are Python's. With -S, Python ignores all installed packages."""
    subprocess.run(
        [sys.executable, *flags, str(ROOT / "scripts" / "register.py"), str(folder)],
        check=True,
        env={"PYTHONPATH": str(path)},
    )


def test_where_nothing_is_installed_the_folder_has_the_entry_points(tmp_path: Path) -> None:
    register(tmp_path, "-S")
    (found,) = metadata.distributions(path=[str(tmp_path)])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (found.metadata["Name"], found.version) == (project["name"], __version__)
    assert {(point.group, point.name, point.value) for point in found.entry_points} == {
        (group, name, value)
        for group, points in project["entry-points"].items()
        for name, value in points.items()
    }
    assert {point.group for point in found.entry_points} == {"vllm.general_plugins"}
    assert [*metadata.distributions(name=project["name"], path=[str(tmp_path)])]
    assert [*metadata.distributions(name="vllm", path=[str(tmp_path)])] == []


def test_where_it_is_installed_nothing_is_written(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    register(first, "-S")
    register(second, "-S", path=first)
    assert not second.exists()
