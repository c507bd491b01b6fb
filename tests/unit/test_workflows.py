"""Workflows, forms and papers of the project name targets, files and versions that there are."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import dyntree_plugin
from dyntree_plugin.admission.versions import SUPPORTED_VLLM

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PAPERS = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
NAMING = [*WORKFLOWS, *FORMS, *PAPERS]
"""Files whose targets of make and whose paths must exist."""

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
MAKE = re.compile(r"\bmake ([a-z0-9][a-z0-9-]*)")
PATH = re.compile(r"(?<![\w./*@-])((?:\./)?[\w.-]+(?:/[\w.-]+)*\.(?:py|md|sh|toml|ya?ml|cff))\b")
PINNED = re.compile(r"[\w.-]+/[\w.-]+@(?:release/)?v\d+(?:\.\d+)*")
KINDS = {"markdown", "input", "textarea", "dropdown", "checkboxes"}


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


def every(told: Any, key: str) -> Iterator[Any]:
    """Yield the values of a key, however deep it lies."""
    if isinstance(told, Mapping):
        if key in told:
            yield told[key]
        told = list(told.values())
    if isinstance(told, list):
        for item in told:
            yield from every(item, key)


def test_the_files_are_found() -> None:
    assert {"tests.yml", "slow.yml", "release.yml", "docs.yml", "vllm-watch.yml"} <= {
        p.name for p in WORKFLOWS
    }
    assert {"bug.yml", "wrong_tokens.yml", "feature.yml", "config.yml"} == {p.name for p in FORMS}
    assert {"lint", "test-fast", "test-e2e"} <= TARGETS


@pytest.mark.parametrize("path", NAMING, ids=lambda path: path.name)
def test_targets_of_make_and_files_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    assert unknown_targets(text) == []
    assert missing_paths(text, path.parent) == []


def test_wrong_targets_and_paths_are_found() -> None:
    text = "- run: make tests\n`make lint` `make all` scripts/none.py docs/gpu.md https://a.b/c.md"
    assert sorted(unknown_targets(text)) == ["all", "tests"]
    assert missing_paths(text, ROOT) == ["scripts/none.py"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_jobs_may_only_read_unless_they_say_more(path: Path) -> None:
    workflow = named(path)
    used = [*every(workflow, "uses")]
    assert [each for each in used if not each.startswith("./") and not PINNED.fullmatch(each)] == []
    assert workflow["permissions"] == {"contents": "read"}
    own = [job for job in workflow["jobs"].values() if "steps" in job]
    assert all("timeout-minutes" in job and "runs-on" in job for job in own)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_jobs_that_are_waited_for_and_workflows_that_are_called_exist(path: Path) -> None:
    workflow = named(path)
    for needs in every(workflow, "needs"):
        assert {*([needs] if isinstance(needs, str) else needs)} <= {*workflow["jobs"]}
    for used in every(workflow, "uses"):
        # YAML 1.1 reads the key `on` as true.
        assert not used.startswith("./") or "workflow_call" in named(ROOT / used)[True]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_forms_have_what_the_forge_asks_for(path: Path) -> None:
    form = named(path)
    if path.name == "config.yml":
        assert all({*link} == {"name", "url", "about"} for link in form["contact_links"])
        return
    assert {"name", "description", "body"} <= {*form} <= {"name", "description", "body", "labels"}
    assert {field["type"] for field in form["body"]} <= KINDS
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in asked]
    assert len({*ids}) == len(ids) > 0
    assert all(field["attributes"]["label"] for field in asked)
    choices = [f for f in asked if f["type"] in ("dropdown", "checkboxes")]
    assert all(field["attributes"]["options"] for field in choices)
    assert any(field.get("validations") == {"required": True} for field in asked)


def test_the_docs_are_built_with_what_the_extra_says() -> None:
    (wanted,) = PROJECT["optional-dependencies"]["docs"]
    runs = [*every(named(ROOT / ".github" / "workflows" / "docs.yml"), "run")]
    assert f'python -m pip install "{wanted}"' in runs


def test_a_release_has_the_packages_of_the_project() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    found = {name.removesuffix("*") for name in tools["setuptools"]["packages"]["find"]["include"]}
    assert {*tools["check-wheel-contents"]["toplevel"]} == found


def test_a_release_is_built_and_checked_with_the_tools_of_the_tests() -> None:
    runs = [*every(named(ROOT / ".github" / "workflows" / "release.yml"), "run")]
    tools = re.compile(r"(?:build|check-wheel-contents|twine)\b")
    wanted = [x for x in PROJECT["optional-dependencies"]["dev"] if tools.match(x)]
    assert " ".join(["python -m pip install", *(f'"{each}"' for each in wanted)]) in runs
    checks = {"twine check --strict dist/*", "check-wheel-contents dist/*.whl"}
    assert {"python -m build"} | checks <= {*runs}


def test_the_papers_have_the_version_of_the_package() -> None:
    citation = named(ROOT / "CITATION.cff")
    assert citation["version"] == dyntree_plugin.__version__
    assert citation["license"] == PROJECT["license"]
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
