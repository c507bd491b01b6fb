"""vLLM chooses attention with trees only while the model of an engine with trees is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.worker.gpu_worker import Worker

from dyntree_plugin.engine import worker
from dyntree_plugin.engine.cpu.worker import TreeCPUWorker
from dyntree_plugin.engine.cuda.worker import TreeGPUWorker

WORKERS = [TreeCPUWorker, TreeGPUWorker]


def paths(of: Any) -> dict[str, str]:
    return {name: AttentionBackendEnum[name].get_path() for name in of.kinds[0].backends}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the workers of these tests ranks of no engine."""
    monkeypatch.setattr(worker, "check_ranks", lambda config: None)
    monkeypatch.setattr(worker.TreeWorkerMixin, "vllm_config", VllmConfig(), raising=False)


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    before = {each.__name__: paths(each) for each in WORKERS}
    yield
    assert {each.__name__: paths(each) for each in WORKERS} == before


@pytest.mark.parametrize("tree_worker", WORKERS)
@pytest.mark.parametrize("fails", [False, True])
def test_ours_are_registered_while_the_model_loads(tree_worker: Any, fails: bool) -> None:
    seen = {}

    def load(self: Any) -> None:
        seen.update(paths(tree_worker))
        if fails:
            raise ValueError("no weights")

    before = paths(tree_worker)
    with mock.patch.object(Worker, "load_model", load):
        try:
            tree_worker.load_model(object.__new__(tree_worker))
        except ValueError:
            assert fails
    assert seen == tree_worker.kinds[0].backends
    assert paths(tree_worker) == before
    assert not set(seen.values()) & set(before.values())


@pytest.mark.skipif(
    not current_platform.is_cpu(), reason="on a GPU, the choice depends on the model"
)
def test_vllms_memory_of_a_choice_does_not_outlive_it() -> None:
    def chosen() -> str:
        with set_current_vllm_config(VllmConfig()):
            return get_attn_backend(64, torch.float32, None).__name__

    during: list[str] = []

    def load(self: Any) -> None:
        during.append(chosen())

    before = chosen()
    with mock.patch.object(Worker, "load_model", load):
        TreeCPUWorker.load_model(object.__new__(TreeCPUWorker))
    assert (before, during) == ("CPUAttentionBackend", ["TreeCPUAttentionBackend"])
    assert chosen() == "CPUAttentionBackend"
