"""The whole stays as small as sizes.toml says."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMITS = tomllib.loads(Path(__file__).with_name("sizes.toml").read_text("utf-8"))
ROOM = {"lines": 150, "words": 150, "kibibytes": 50}
"""By how much a limit may exceed what is there."""


def lines(folder: str, others: set[str]) -> int:
    """Count the lines of a folder's Python files, but for those below one of ``others``."""
    apart = [ROOT / other for other in others if other.startswith(f"{folder}/")]
    files = [
        path
        for path in (ROOT / folder).rglob("*.py")
        if not any(path.is_relative_to(other) for other in apart)
    ]
    return sum(len(path.read_text("utf-8").splitlines()) for path in files)


def sizes(limits: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Measure everything that has a limit."""
    folders = {*limits["lines"]}
    pages = {name: sorted(ROOT.glob(name)) for name in limits["words"]}
    kept = {name: (ROOT / name).rglob("*") for name in limits["kibibytes"]}
    return {
        "lines": {folder: lines(folder, folders) for folder in folders},
        "words": {
            name: sum(len(path.read_text("utf-8").split()) for path in paths)
            for name, paths in pages.items()
        },
        "kibibytes": {
            name: sum(path.stat().st_size for path in paths if path.is_file()) // 1024
            for name, paths in kept.items()
        },
    }


def test_every_folder_with_python_has_a_limit() -> None:
    tops = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[!.]*/**/*.py")}
    assert tops - {"build", "dist"} == {folder.partition("/")[0] for folder in LIMITS["lines"]}


@pytest.mark.parametrize("unit", [*LIMITS])
def test_nothing_is_larger_than_its_limit_nor_the_limit_much_larger(unit: str) -> None:
    """A change that needs a higher limit raises it in sizes.toml, and its commit says what left
    for it, or why nothing could. A change that takes away lowers it."""
    found, room = sizes(LIMITS)[unit], ROOM[unit]
    wrong = {
        name: f"{found[name]}, limit {limit}"
        for name, limit in LIMITS[unit].items()
        if not limit - room <= found[name] <= limit
    }
    assert wrong == {}


def test_a_folder_with_a_limit_of_its_own_counts_once() -> None:
    both = lines("tests", set())
    assert lines("tests", {"tests/repository"}) + lines("tests/repository", set()) == both
