"""The scripts for a GPU state their needs, keep their results, and resume; Python is a fake."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PARTS = (
    *("first", "identity-bf16", "identity-fp32", "tests", "launches"),
    *("speed-1b", "speed-8b", "offload"),
)
H200 = 139  # GiB of memory

PYTHON = r"""#!/bin/bash
# Plays Python on a GPU: notes what it is asked for, with a word per line, and answers.
folder=$(dirname "$0")
case "$*" in
    *find_spec*)
        [[ -f $folder/has_$(sed "s/.*find_spec('\([a-z.]*\)').*/\1/" <<<"$*") ]]
        exit
        ;;
    *is_available*total_memory*) cat "$folder/memory"; exit ;;
    *is_available* | *register.py* | *"cli doctor"* | *compileall*) exit 0 ;;
    *"gpu_results.py missing") cat "$folder/missing"; exit ;;
    *"gpu_results.py stamp") echo "# $(cat "$folder/commit")"; exit ;;
    *"gpu_results.py whole"*) [[ -f $folder/whole ]]; exit ;;
esac
# Bash writes every line by itself, and the first part calls several programs at once.
flock "$folder/lock" printf '%s\n' CALL "$@" >>"$folder/calls"
case "$*" in
    *"-m pytest"*)
        echo "tests/a.py::test_one[x y] PASSED  [ 50%]"
        echo "tests/a.py::test_two FAILED  [100%]"
        exit 1
        ;;
    *"-m benchmarks.serve"*)
        echo measured
        echo '{}' >"$(sed 's/.*--output \([^ ]*\).*/\1/' <<<"$*")"
        ;;
    *launches.py*) echo "12 operations" ;;
esac
"""


class Machine:
    """Run a script with the fake Python."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        python = folder / "python"
        python.write_text(PYTHON)
        python.chmod(0o755)
        (folder / "commit").write_text("one")
        (folder / "memory").write_text(f"{H200}\n")
        (folder / "missing").touch()

    def run(self, script: str = "gpu_e2e.sh", **variables: str) -> subprocess.CompletedProcess[str]:
        own = {"PYTHON": str(self.folder / "python"), "PYTHONPATH": ""}
        return run(self.folder, script, **own | variables)

    def calls(self, of: str) -> list[list[str]]:
        """Return the arguments of each call of a program."""
        noted = (self.folder / "calls").read_text() if (self.folder / "calls").exists() else ""
        calls = [call.splitlines()[1:] for call in noted.split("CALL")[1:]]
        return [call for call in calls if of in " ".join(call)]


def run(
    folder: Path, script: str = "gpu_e2e.sh", **variables: str
) -> subprocess.CompletedProcess[str]:
    own = {"PYTHON": sys.executable, "OUT": str(folder / "out"), "MODELS": str(folder / "models")}
    return subprocess.run(
        [str(SCRIPTS / script)],
        env={**os.environ, **own, **variables},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def options(call: list[str], name: str) -> list[str]:
    return [value for word, value in pairwise(call) if word == name]


def test_a_part_that_there_is_not_is_refused_with_those_there_are(tmp_path: Path) -> None:
    done = run(tmp_path, PART="speed")
    assert done.returncode == 2
    assert all(each in done.stderr for each in PARTS)
    assert not list(tmp_path.iterdir())


def test_the_first_part_checks_kernels_and_tokens_and_measures_whatever_fails(
    machine: Machine,
) -> None:
    done = machine.run(PART="first")
    assert done.returncode == 1
    assert "kernels exited with 1, tokens with 0, speed with 0" in done.stdout
    (checks,) = machine.calls("-m pytest")
    assert any("check_attention" in word for word in checks)
    (tokens,) = machine.calls("device_identity")
    assert options(tokens, "--engine") == ["no speculation", "tree of 16"]
    (measured,) = machine.calls("-m benchmarks.serve")
    assert options(measured, "--batch") == ["1", "8"]
    assert {"--chain", "--dyntree"} <= {*measured}
    # Results that it has judged are not judged again by the next part.
    machine.run(PART="identity-bf16")
    first, second = machine.calls("device_identity")
    assert first[1] == second[1] == str(machine.out / "gpu-identity-bf16.json")


def test_tests_that_passed_are_not_run_again_by_the_same_code(machine: Machine) -> None:
    log = machine.out / "gpu-tests.txt"
    for _ in range(2):
        machine.run(PART="tests")
    assert log.read_text().count("PASSED") == 2
    (machine.folder / "commit").write_text("another")
    machine.run(PART="tests")
    assert log.read_text().startswith("# another\n")
    assert log.read_text().count("PASSED") == 1


def test_a_log_leaves_out_the_tests_that_it_says_have_passed(tmp_path: Path) -> None:
    checks = tmp_path / "test_few.py"
    checks.write_text("def test_a(): pass\ndef test_ab(): pass\ndef test_b(): assert False\n")
    log = tmp_path / "log"
    log.write_text("test_few.py::test_a PASSED  [ 33%]\ntest_few.py::test_b FAILED [ 66%]\n")
    plugin = {"PYTHONPATH": str(SCRIPTS.parent / "tests"), "PASSED_BEFORE": str(log)}
    command = "-m pytest -v -p passed_before -p no:cacheprovider --rootdir=. test_few.py"
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=tmp_path,
        env=os.environ | plugin,
        capture_output=True,
        text=True,
    )
    assert "1 failed, 1 passed, 1 deselected" in done.stdout


HIDING = """
import sys

class Nowhere:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("vllm", "numba"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nowhere())
"""


def test_kernels_can_be_checked_where_vllm_and_numba_are_missing(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="these kernels are written in Triton")
    (tmp_path / "hiding.py").write_text(HIDING)
    root = SCRIPTS.parent
    path = os.pathsep.join(map(str, [tmp_path, root, root / "kernels"]))
    checks = sorted((root / "tests" / "kernels" / "device").glob("check_*.py"))
    command = "-m pytest -q -p hiding -p no:cacheprovider --collect-only"
    done = subprocess.run(
        [sys.executable, *command.split(), *map(str, checks)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "check_attention.py::test_served_shapes" in done.stdout
    assert "check_draft_rows.py::" not in done.stdout


def runs(module: str) -> bool:
    """Return whether `python -m module` does anything."""
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    if spec is None or spec.origin is None:
        return False
    if spec.name.endswith(".__main__"):
        return True
    return 'if __name__ == "__main__":' in Path(spec.origin).read_text("utf-8")


def test_what_a_script_runs_is_there_and_does_something() -> None:
    for script in SCRIPTS.glob("*.sh"):
        text = script.read_text("utf-8")
        ours = re.findall(r"-m ((?:benchmarks|dyntree_\w+)[\w.]*)", text)
        assert [module for module in ours if not runs(module)] == []
        files = re.findall(r"\b(?:tests|scripts|benchmarks)/[\w/*]+\.py\b", text)
        assert [file for file in files if not [*SCRIPTS.parent.glob(file)]] == []
        assert ours or files or script.name == "install.sh"
