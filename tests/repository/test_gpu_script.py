"""The scripts for a GPU name what there is, and their checks need neither vLLM nor numba."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PARTS = (
    *("first", "identity-bf16", "identity-fp32", "identity-bits", "tests", "launches"),
    *("limits", "speed-8b", "speed-mtp", "speed-mla"),
    *("speed-1b", "speed-eagle3-1b", "speed-hybrid", "offload"),
)


def test_a_part_that_there_is_not_is_refused_with_those_there_are(tmp_path: Path) -> None:
    own = {"PYTHON": sys.executable, "OUT": str(tmp_path / "out"), "PART": "speed"}
    done = subprocess.run(
        [str(SCRIPTS / "gpu_e2e.sh")], env=os.environ | own, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert all(each in done.stderr for each in PARTS)
    assert not list(tmp_path.iterdir())


def test_a_part_ends_within_a_call_of_10_minutes() -> None:
    for script in ("gpu_e2e.sh", "gpu_kernels.sh"):
        limits = re.findall(r"LIMIT:-(\d+)", (SCRIPTS / script).read_text("utf-8"))
        assert limits
        assert max(map(int, limits)) <= 540


def test_measured_trees_fill_tiles_with_their_roots() -> None:
    text = (SCRIPTS / "gpu_e2e.sh").read_text("utf-8")
    known = {int(nodes) for nodes in re.findall(r"\[(\d+)\]=\d", text)}
    engines = re.findall(r'of_\w+=\("[\d ]+" (?:"[\d ]+"|0) "([\d ]+)"\)', text)
    engines += re.findall(r'^ +speed .* \d "?(\d+)"? "\$', text, re.MULTILINE)
    measured = {int(nodes) for each in engines for nodes in each.split()}
    assert measured == known
    assert all((nodes + 1).bit_count() == 1 for nodes in measured)


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
