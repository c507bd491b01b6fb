"""`dyntree tune` says where it is: also in a file, and with losses of the last steps alone."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from dyntree_plugin.commands.tune import learn, screen
from dyntree_plugin.commands.tune.settings import Folder
from dyntree_plugin.tune.fit import Machine
from dyntree_plugin.tune.shards import Batch, Shards, save_tensors

PATIENCE = 60.0


def test_lines_reach_a_file_while_a_stage_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "INTERVAL", 0.01)
    log = tmp_path / "log"
    with log.open("w") as file, screen.stage(Console(file=file), "fit", 10) as update:
        assert " 0/10" in log.read_text()
        update(completed=3, note="loss 2.5")
        end = time.monotonic() + PATIENCE
        while "3/10" not in log.read_text() and time.monotonic() < end:
            time.sleep(0.01)
        assert "loss 2.5" in log.read_text()
        before = len(log.read_text())
        # Nothing is done meanwhile.
        while len(log.read_text()) == before and time.monotonic() < end:
            time.sleep(0.01)
        assert len(log.read_text()) > before
        update(completed=10)
    assert "10/10" in log.read_text().splitlines()[-1]


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    """Return 40 texts of a token."""
    rows: dict[str, Any] = {
        "tokens": torch.zeros(40, dtype=torch.int32),
        "top_tokens": torch.zeros(40, 1, dtype=torch.int32),
        "top_log_probs": torch.zeros(40, 1, dtype=torch.float16),
        "lengths": torch.ones(40, dtype=torch.int64),
    }
    save_tensors(rows, tmp_path / "shard.safetensors")
    return Shards([tmp_path / "shard.safetensors"])


def trained(shards: Shards, folder: Path, rows: int, loss: Any, logits: int) -> dict[int, str]:
    """Train for 40 / rows steps; return the notes."""
    lessons = learn.Lessons(Folder(folder), learn=shards, held_out=shards)
    settings: Any = SimpleNamespace(epochs=1, rows=rows, rate=1e-3, seed=0)
    notes: dict[int, str] = {}

    def update(*, completed: int, note: str) -> None:
        notes[completed] = note

    machine = Machine(None, torch.float32)
    learn.train(lessons, settings, machine, torch.nn.Linear(1, 1), loss, update, logits)
    return notes


def zero(model: torch.nn.Module) -> torch.Tensor:
    return torch.stack([weight.sum() for weight in model.parameters()]).sum() * 0


def test_the_loss_shown_is_of_the_last_steps_which_are_named(
    shards: Shards, tmp_path: Path
) -> None:
    given = iter([10.0] * 20 + [1.0] * 20)

    def loss(model: torch.nn.Module, _: Batch) -> tuple[torch.Tensor, float]:
        return zero(model) + (5.0 if torch.is_inference_mode_enabled() else next(given)), 1.0

    notes = trained(shards, tmp_path, 1, loss, 1)
    assert notes[40] == "loss 1.000 in steps 39 to 40, held out 5.000 after step 40"
    assert notes[21] == "loss 5.500 in steps 20 to 21, held out 5.000 after step 20"
    curve = learn.read_curve(Folder(tmp_path).losses)
    assert curve[20] == (10.0, 5.0)
    assert curve[22] == (1.0, 5.0)


def test_a_loss_of_many_logits_reads_few_texts_at_once(shards: Shards, tmp_path: Path) -> None:
    most = 0

    def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
        nonlocal most
        most = max(most, len(batch["tokens"]))
        return zero(model), 1.0

    trained(shards, tmp_path / "few", 8, loss, 2**24)
    assert most == 2
    # Control: with few logits, two copies have half of a step's texts each, or a measure all.
    trained(shards, tmp_path / "many", 8, loss, 1)
    assert most == 8
