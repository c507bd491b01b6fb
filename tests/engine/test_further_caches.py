"""What an engine with further drafts leaves behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from dyntree_plugin.engine.drafts.draft_model import FurtherDraft, TreeSpeculator
from dyntree_plugin.engine.runner import TreeRunnerMixin


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kv_cache = torch.zeros(8)


def test_an_engine_that_ends_releases_the_cache_of_every_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(GPUModelRunner, "shutdown", lambda self: ended.append(self))
    config: Any = SimpleNamespace()
    model = torch.nn.Sequential(Layer(), torch.nn.Sequential(Layer()))
    speculator: Any = object.__new__(TreeSpeculator)
    speculator.further = [FurtherDraft(model, config, hidden_size=4, vocab_size=8)]
    runner: Any = object.__new__(TreeRunnerMixin)
    runner.speculator, runner.grammars = speculator, None
    runner.shutdown()
    assert ended == [runner]
    caches = [layer.kv_cache for layer in model.modules() if isinstance(layer, Layer)]
    assert [cache.numel() for cache in caches] == [0, 0]
