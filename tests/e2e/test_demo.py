"""The demonstration on real engines."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.e2e

COMMAND = [sys.executable, "-m", "dyntree_plugin.cli", "demo"]
SAMPLED = ["--num-prompts=2", "--max-tokens=48", "--temperature=0.8", "--top-p=0.95", "--seed=7"]
WHOLE = ["--dtype=float32", '--dyntree={"budget": "fixed"}']


def demonstrated(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)


def test_the_command_completes_draws_and_finds_the_same_text() -> None:
    done = demonstrated(*SAMPLED, *WHOLE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The text is the same" in done.stdout
    row = re.search(r"tokens per target step │ +1\.00 │ +([\d.]+)", done.stdout)
    assert row is not None, done.stdout
    assert float(row[1]) > 1.5
    assert "✓" in done.stdout.split("One step:")[1].split("This step emitted")[0]
    assert "\x1b" not in done.stdout
    # vLLM's own messages are not shown.
    assert "INFO" not in done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr


@pytest.mark.slow
def test_models_that_do_not_fit_end_with_status_2_before_any_engine_starts(
    model_folder: Callable[..., str],
) -> None:
    length = {"max_position_embeddings": 2048}
    target = model_folder("target", **length)
    done = demonstrated(
        "--target", target, "--draft", model_folder("draft", vocab_size=256, **length)
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "vocab_size" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Starting the target" not in done.stdout
