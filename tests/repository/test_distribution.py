"""The sdist and the wheel are built, hold what they should, and pass the checks of an index."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from bare import PROJECT, ROOT, Environment

import dyntree_plugin

IGNORED = [".git", *(ROOT / ".gitignore").read_text("utf-8").replace("/\n", "\n").splitlines()]
PACKAGES = {
    "dyntree_plugin": ROOT / "dyntree_plugin",
    "dyntree_kernels": ROOT / "kernels" / "dyntree_kernels",
    "vllm_cpu_runner": ROOT / "kernels" / "vllm_cpu_runner",
}
URL = "https://forge.example/owner/name"
TAG = f"v{dyntree_plugin.__version__}"
LINK = re.compile(r"\]\(([^()\s]+)\)")


@dataclass(frozen=True)
class Built:
    """A copy of the repository, both distributions, and the wheel's files in a folder."""

    source: Path
    sdist: Path
    wheel: Path
    unpacked: Path


def run(*command: str, cwd: Path, url: str = "") -> str:
    told = {name: value for name, value in os.environ.items() if name != "REPO_URL"}
    told |= {"REPO_URL": url} if url else {}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=told, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("distribution")
    source, out = folder / "source", folder / "dist"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*IGNORED))
    run("-m", "build", "--no-isolation", "--outdir", str(out), str(source), cwd=folder)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    return Built(source, sdist, wheel, folder / "unpacked")


def described(folder: Path) -> Message:
    (found,) = folder.glob("*.dist-info/METADATA")
    return Parser().parsestr(found.read_text("utf-8"))


def relative(text: str) -> list[str]:
    """Return the links that lead nowhere from another place than the repository."""
    return [link for link in LINK.findall(text) if not link.startswith("https://")]


def different(there: Path, names: Iterable[str], source: Path) -> list[str]:
    """Return the files that are missing, or not those of the source byte for byte."""
    return [
        name
        for name in names
        if not (there / name).is_file()
        or (there / name).read_bytes() != (source / name).read_bytes()
    ]


def test_the_checks_of_an_index_and_of_wheels_find_nothing(built: Built) -> None:
    run("-m", "twine", "check", "--strict", str(built.sdist), str(built.wheel), cwd=ROOT)
    run("-m", "check_wheel_contents", str(built.wheel), cwd=ROOT)


def test_the_sdist_has_every_file_of_the_repository(built: Built) -> None:
    wanted = {
        path.relative_to(built.source).as_posix()
        for path in built.source.rglob("*")
        if path.is_file() and ".egg-info" not in path.parent.name
    }
    assert {"Makefile", "tests/repository/test_house.py", "docs/images/show.png"} <= wanted
    with tarfile.open(built.sdist) as archive:
        assert wanted - {name.partition("/")[2] for name in archive.getnames()} == set()


def test_the_wheel_has_the_packages_with_their_types_and_no_more(built: Built) -> None:
    for name, folder in PACKAGES.items():
        modules = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
        assert different(built.unpacked / name, {*modules, "py.typed"}, folder) == []
        there = built.unpacked / name
        assert {path.relative_to(there).as_posix() for path in there.rglob("*.py")} == modules
    tops = {path.name for path in built.unpacked.iterdir()}
    assert {name for name in tops if not name.endswith(".dist-info")} == {*PACKAGES}


def test_the_wheel_has_the_models_that_commands_use_in_12_mb(built: Built) -> None:
    here = PACKAGES["dyntree_plugin"] / "pair" / "weights"
    there = built.unpacked / "dyntree_plugin" / "pair" / "weights"
    models = {path.name for path in here.iterdir() if path.is_dir()}
    assert {path.name for path in there.iterdir() if path.is_dir()} == models - {"second_draft"}
    kept = [f"{name}/model.safetensors" for name in models - {"second_draft"}]
    assert different(there, ["provenance.json", *kept], here) == []
    assert built.wheel.stat().st_size <= 12_000_000


def test_a_wheel_writes_the_dashboards_of_the_repository(built: Built, tmp_path: Path) -> None:
    bare = Environment(tmp_path, [built.unpacked])
    said = bare.dyntree("dashboards", "to here").stdout
    there = tmp_path / "to here"
    written = {p.relative_to(there).as_posix() for p in there.rglob("*") if p.is_file()}
    assert {
        "grafana/compose.yaml",
        "grafana/dashboards/tree_at_a_glance.json",
        "grafana/prometheus/alerts.yml",
        "grafana/provisioning/datasources/prometheus.yaml",
    } <= written
    assert different(there, written, ROOT) == []
    assert "docker compose -f 'to here'/grafana/compose.yaml up" in said
    assert bare.python("-c", "import dyntree_plugin as d; print(d.__file__)").stdout.startswith(
        str(built.unpacked)
    )


def test_without_an_address_the_description_has_no_link_into_the_repository(built: Built) -> None:
    told = described(built.unpacked)
    assert told["Name"] == PROJECT["name"]
    assert told["License-Expression"] == "Apache-2.0"
    assert told.get_all("Project-URL") is None
    assert relative(told.get_payload()) == []
    assert "![" not in told.get_payload()


def test_with_an_address_links_lead_to_files_of_the_version(built: Built, tmp_path: Path) -> None:
    code = "from setuptools import build_meta as b; b.prepare_metadata_for_build_wheel('.')"
    source = tmp_path / "source"
    shutil.copytree(built.source, source)
    run("-c", code.replace("'.'", f"{str(tmp_path)!r}"), cwd=source, url=f"{URL}/")
    told = described(tmp_path)
    assert f"Repository, {URL}" in told.get_all("Project-URL")
    text = told.get_payload()
    assert relative(text) == []
    own = [link.removeprefix(f"{URL}/") for link in LINK.findall(text) if link.startswith(URL)]
    assert f"raw/{TAG}/docs/images/show.png" in own
    for kind, tag, path in (link.partition("#")[0].split("/", 2) for link in own):
        assert tag == TAG
        assert (ROOT / path).is_dir() if kind == "tree" else (ROOT / path).is_file()
