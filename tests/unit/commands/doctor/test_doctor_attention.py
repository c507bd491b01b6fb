"""`dyntree doctor` runs vLLM's attention in a process that may die of it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
import torch

from dyntree_plugin.commands.doctor import kernels


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    kernels._attention_fails.cache_clear()
    yield
    kernels._attention_fails.cache_clear()


def test_attention_that_runs_is_said_with_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels.layout(64, torch.bfloat16)
    assert found.status == "ok", found
    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    assert found.found.startswith(f"{isa}; ")
    kernels._attention_fails.cache_clear()
    monkeypatch.setattr(kernels, "_ROUNDING", 0)
    wrong = kernels.layout(64, torch.bfloat16)
    assert (wrong.status, "wrong by" in wrong.advice) == ("fail", True)


def test_a_shape_without_a_kernel_fails_in_vllms_words() -> None:
    found = kernels.layout(576, torch.bfloat16)
    assert found.status == "fail"
    assert "Unsupported CPU attention configuration" in found.advice


def test_a_death_is_named_by_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, -4, "", "")

    monkeypatch.setattr(subprocess, "run", dies)
    found = kernels.layout(64, torch.bfloat16)
    assert found.status == "fail"
    assert "signal 4 (SIGILL)" in found.advice
    assert "--dtype float32" in found.advice
