"""Verification on CUDA writes a step's output to fixed addresses, which others read beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dyntree_plugin.engine.cuda.runner import TreeGPUModelRunner
from dyntree_plugin.engine.runner import TreeRunnerMixin


@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_samples_when_nothing_reads_the_last_output_any_more(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM copies it to the host on one stream, and sends it to earlier stages on another."""
    busy, copying, sending = set[str](), "to the host", "to earlier stages"

    def sample(runner: Any, batch: object) -> object:
        assert not busy
        return batch

    monkeypatch.setattr(TreeRunnerMixin, "sample", sample)
    runner: Any = object.__new__(TreeGPUModelRunner)
    vars(runner)["main_stream"] = SimpleNamespace(wait_stream=busy.remove)
    runner.output_copy_stream, runner.pp_handler = copying, None
    busy.add(copying)
    if stages > 1:
        runner.pp_handler = SimpleNamespace(broadcast_stream=sending)
        busy.add(sending)
    assert runner.sample("batch") == "batch"
