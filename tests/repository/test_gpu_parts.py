"""Every part of the GPU suite starts without a GPU: commands are taken, models are made, engines
are admitted, results come to their places. No engine runs."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_gpu_script import PARTS, SCRIPTS

pytestmark = pytest.mark.e2e

MACHINE = Path(__file__).with_name("gpu_machine.py")
_E2E = Path(__file__).parents[1] / "e2e"
RESULTS = {
    "first": ["gpu-identity-bf16-h200.json", "serve-gpu-first-h200.json"],
    "tests": ["gpu-tests-h200.txt"],
    "launches": ["gpu-launches-h200.txt"],
    "limits": ["gpu-limits-h200.json"],
    "kernels": ["kernels-h200.json", "kernels-checks-h200.xml", "table-nvidia-h200.json"],
    **{part: [f"gpu-{part}-h200.json"] for part in PARTS if part.startswith("identity")},
}
"""Files of a part; of those of speed, the benchmark's alone."""
Ran = tuple[Path, subprocess.CompletedProcess[str]]


def results(part: str) -> list[str]:
    return RESULTS.get(part, [f"serve-gpu-{part.removeprefix('speed-')}-h200.json"])


def run(part: str, folder: Path, **settings: str) -> Ran:
    """Run a part in a folder, in which ``out`` has the results and ``noted`` the engines."""
    (folder / "scratch").mkdir(parents=True)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{MACHINE}" "$@"\n')
    python.chmod(0o755)
    own = {
        "PART": part,
        "PYTHON": str(python),
        "PYTHONPATH": os.pathsep.join(map(str, (_E2E.parent, _E2E))),
        "OUT": str(folder / "out"),
        "MODELS": str(folder / "models"),
        "NOTED": str(folder / "noted"),
        "TMPDIR": str(folder / "scratch"),
        "TRITON_INTERPRET": "1",
    }
    script = SCRIPTS / ("gpu_kernels.sh" if part == "kernels" else "gpu_e2e.sh")
    return folder, subprocess.run(
        [script], env=os.environ | own | settings, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Run all parts."""
    folder = tmp_path_factory.mktemp("suite")
    with ThreadPoolExecutor(2) as pool:
        every = {p: pool.submit(run, p, folder / p) for p in (*PARTS, "kernels")}
        return {part: ran.result() for part, ran in every.items()}


@pytest.mark.slow
@pytest.mark.parametrize("part", [*PARTS, "kernels"])
def test_a_part_ends_well_and_leaves_its_results(part: str, suite: dict[str, Ran]) -> None:
    folder, done = suite[part]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert all((folder / "out" / name).stat().st_size > 0 for name in results(part))


@pytest.mark.slow
def test_every_engine_is_admitted(suite: dict[str, Ran], tmp_path: Path) -> None:
    noted = [folder / "noted" for folder, _ in suite.values()]
    lines = [path.read_text() for path in noted if path.exists()]
    assert len(lines) == len(suite) - 2, "neither tests nor kernels start an engine here"
    broken = lines[0].splitlines()[-1].replace('"node_budget": ', '"node_budget": -')
    (tmp_path / "noted").write_text("".join(lines) + broken)
    roots = os.pathsep.join(map(str, (_E2E.parent, _E2E, SCRIPTS.parent)))
    done = subprocess.run(
        [sys.executable, MACHINE, "admit", tmp_path / "noted"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": roots},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    assert [line for line in refused if broken not in line] == []
    assert len(refused) == 1, "The control was admitted."


@pytest.mark.parametrize(
    ("part", "at"), [("limits", "6"), ("identity-bf16", "8"), ("kernels", "6")]
)
def test_what_was_measured_is_there_if_a_part_is_killed(part: str, at: str, tmp_path: Path) -> None:
    # Several engines are compared at once, so the first results are written a little later.
    folder, done = run(part, tmp_path / part, DIES_AT=at, CHECKS="0")
    assert done.returncode != 0
    assert (folder / "out" / results(part)[0]).stat().st_size > 0
