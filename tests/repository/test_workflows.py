"""Workflows and papers of the project name targets, files and versions that there are."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import dyntree_plugin
from dyntree_plugin.admission.versions import SUPPORTED_VLLM

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PAPERS = [
    ROOT / name
    for name in (
        *("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
        ".github/PULL_REQUEST_TEMPLATE.md",
    )
]
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
MAKE = re.compile(r"\bmake ([a-z0-9][a-z0-9-]*)")
PATH = re.compile(r"(?<![\w./*@-])((?:\./)?[\w.-]+(?:/[\w.-]+)*\.(?:py|md|sh|toml|ya?ml|cff))\b")
PINNED = re.compile(r"[\w.-]+/[\w.-]+@(?:release/)?v\d+(?:\.\d+)*")


def named(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def unknown_targets(text: str) -> list[str]:
    """Return the targets of make that are named as code or commands, and do not exist."""
    commands = re.findall(r"`([^`]*)`", text) + re.findall(
        r"^\s*(?:- run: )?(make .*)$", text, re.M
    )
    return [name for line in commands for name in MAKE.findall(line) if name not in TARGETS]


def missing_paths(text: str, folder: Path) -> list[str]:
    found = PATH.findall(re.sub(r"https?://\S+", "", text))
    return [name for name in found if not any((at / name).exists() for at in (ROOT, folder))]


def test_targets_of_make_and_files_exist() -> None:
    for path in [*WORKFLOWS, *FORMS, *PAPERS]:
        text = path.read_text("utf-8")
        assert [*unknown_targets(text), *missing_paths(text, path.parent)] == [], path


def test_wrong_targets_and_paths_are_found() -> None:
    text = "- run: make tests\n`make lint` `make all` scripts/none.py docs/gpu.md https://a.b/c.md"
    assert sorted(unknown_targets(text)) == ["all", "tests"]
    assert missing_paths(text, ROOT) == ["scripts/none.py"]


def test_actions_are_pinned_and_jobs_may_only_read_unless_they_say_more() -> None:
    for path in WORKFLOWS:
        used = re.findall(r"^\s*(?:- )?uses: (\S+)", path.read_text("utf-8"), re.M)
        others = [each for each in used if not each.startswith("./")]
        assert [each for each in others if not PINNED.fullmatch(each)] == []
        assert named(path)["permissions"] == {"contents": "read"}


def test_the_papers_have_the_version_of_the_package() -> None:
    citation = named(ROOT / "CITATION.cff")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert citation["version"] == dyntree_plugin.__version__
    assert citation["license"] == project["license"]
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    (newest, *_) = re.findall(r"^## \[([^]]+)\] - (?:unreleased|[\d-]{10})$", changes, re.M)
    assert newest == dyntree_plugin.__version__


def test_the_watch_reads_the_versions_of_the_package_and_of_pip() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "newest_vllm.py"))
    assert script["supported"](script["VERSIONS"].read_text("utf-8")) == SUPPORTED_VLLM
    told = "vllm (0.33.0)\nAvailable versions: 0.33.0, 0.32.0\n  INSTALLED: 0.32.0\n"
    assert script["newest"](told) == "0.33.0"
    with pytest.raises(ValueError, match="pip tells no version"):
        script["newest"]("ERROR: No matching distribution found for vllm")
    with pytest.raises(ValueError, match="SUPPORTED_VLLM"):
        script["supported"]("SUPPORTED_VLLM = None")
