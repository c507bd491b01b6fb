"""Machine code on disk: matching files are used, and no problem of the disk stops a kernel."""

from __future__ import annotations

import ast
import errno
import importlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest

import dyntree_kernels
import vllm_cpu_runner
from dyntree_kernels.cpu import compiled as module

ADD = """
from dyntree_kernels.cpu.compiled import compiled

@compiled
def add(x):
    return x + {step}
"""
TWICE = """
from added_by_another_file import add
from dyntree_kernels.cpu.compiled import compiled

@compiled
def twice(x):
    return add(add(x))
"""


def write(folder: Path, step: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "added_by_another_file.py").write_text(ADD.format(step=step))
    (folder / "calls_another_file.py").write_text(TWICE)
    return folder


Start = Callable[..., Any]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that imports a folder's compiled functions as a new process does.

    It returns the function `twice`.
    """

    def twice(folder: Path) -> Any:
        for name in ("added_by_another_file", "calls_another_file"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        for each in (module._folder, module._warn, importlib):
            getattr(each, "cache_clear", importlib.invalidate_caches)()
        with monkeypatch.context() as path:
            path.syspath_prepend(folder)
            return importlib.import_module("calls_another_file").twice

    return twice


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dyntree"


def loaded(function: Any) -> int:
    return sum(function.stats.cache_hits.values())


def files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_machine_code_is_found_again_and_in_another_checkout(
    tmp_path: Path, start: Start, cache: Path
) -> None:
    sources = write(tmp_path / "kernels")
    twice = start(sources)
    assert (twice(1), twice(1.5), loaded(twice)) == (3, 3.5, 0)
    kept = files(cache)
    assert len(kept) == 4
    (tmp_path / "other").mkdir()
    copy = Path(shutil.copytree(sources, tmp_path / "other" / "kernels"))
    for folder in (sources, copy):
        twice = start(folder)
        assert (twice(1), twice(1.5), loaded(twice)) == (3, 3.5, 2)
    assert files(cache) == kept


@pytest.mark.parametrize("digested", [True, False])
def test_a_change_of_what_a_function_calls_is_seen(
    digested: bool, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: it is not seen if folders are not named by a digest of the sources."""
    if not digested:
        monkeypatch.setattr(module, "_digest", lambda package: "sources")
    assert start(write(tmp_path / "kernels"))(1) == 3
    assert start(write(tmp_path / "kernels", step=10))(1) == (21 if digested else 3)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:1000] + bytes(100) + content[1100:],
    ],
    ids=["truncated", "holed"],
)
def test_a_damaged_file_is_compiled_anew(
    damage: Callable[[bytes], bytes], tmp_path: Path, start: Start, cache: Path
) -> None:
    sources = write(tmp_path / "kernels")
    start(sources)(1)
    damaged = {path: damage(path.read_bytes()) for path in files(cache)}
    for path, content in damaged.items():
        path.write_bytes(content)
    twice = start(sources)
    assert (twice(1), loaded(twice)) == (3, 0)
    # How long a file is depends on which equal objects numba happens to share.
    assert {*files(cache)} == damaged.keys()
    assert all(path.read_bytes() != content for path, content in damaged.items())
    twice = start(sources)
    assert (twice(1), loaded(twice)) == (3, 1)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_folder_that_may_only_be_read_serves(
    tmp_path: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sources = write(tmp_path / "kernels")
    start(sources)(1)

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for owner, name in ((os, "utime"), (Path, "write_bytes"), (Path, "mkdir")):
        monkeypatch.setattr(owner, name, refuse)
    twice = start(sources)
    assert (twice(1), loaded(twice), warnings(caplog)) == (3, 1, [])
    assert twice(1.5) == 3.5
    assert len(warnings(caplog)) == 1


def test_processes_that_compile_at_once_all_work(tmp_path: Path, start: Start) -> None:
    sources = write(tmp_path / "kernels")
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(sources), *sys.path]),
    }
    program = "import sys; from calls_another_file import twice; print(twice(eval(sys.argv[1])))"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, value], env=environment, stdout=-1, text=True
        )
        for value in ("1", "1", "1.5")
    ]
    assert [each.communicate()[0].strip() for each in processes] == ["3", "3", "3.5"]
    twice = start(sources)
    assert (twice(1), twice(1.5), loaded(twice)) == (3, 3.5, 2)


PACKAGES = {
    "dyntree_kernels": Path(dyntree_kernels.__file__).parent / "cpu",
    "vllm_cpu_runner": Path(vllm_cpu_runner.__file__).parent,
}


OURS = ("dyntree", "vllm_cpu_runner")


@pytest.mark.parametrize("package", PACKAGES)
def test_the_digest_has_every_source_of_the_kernels(package: str) -> None:
    folder, count = PACKAGES[package], 0
    kernels = PACKAGES["dyntree_kernels"]
    for path in folder.glob("*.py"):
        source = path.read_text()
        assert path == kernels / "compiled.py" or "cache=True" not in source, path
        if "@compiled" not in source:
            continue
        count += 1
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(
                ("dyntree", "vllm_cpu_runner")
            ):
                origin = importlib.util.find_spec(str(node.module))
                assert origin is not None
                assert Path(str(origin.origin)).parent in (kernels.parent, kernels, folder), path
    assert count > 4
