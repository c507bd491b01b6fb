"""The memory that vLLM's CPU worker asks for before it starts, and what doctor says of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dyntree_plugin.commands.doctor import checks

pytest.importorskip("vllm.v1.worker.cpu_worker")

from vllm.utils import cpu_resource_utils
from vllm.utils.cpu_resource_utils import MemoryNodeInfo
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.gpu_worker import Worker


@pytest.mark.parametrize("share", [0.5, 0.92])
def test_doctor_fails_where_the_worker_does(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Half of the memory is free."""

    def node(_: int) -> MemoryNodeInfo:
        return MemoryNodeInfo(total_memory=16 << 30, available_memory=8 << 30)

    without_binding = SimpleNamespace(
        ops=SimpleNamespace(_C=SimpleNamespace(init_cpu_memory_env=lambda nodes: None))
    )
    monkeypatch.setattr(cpu_worker, "torch", without_binding)
    monkeypatch.setattr(Worker, "__init__", lambda self, *_, **__: None)
    for module in (cpu_worker, cpu_resource_utils):
        monkeypatch.setattr(module, "get_memory_node_info", node)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(gpu_memory_utilization=share, kv_cache_memory_bytes=None)
    )
    monkeypatch.setattr(cpu_worker.CPUWorker, "parallel_config", SimpleNamespace(), raising=False)
    refused = ""
    try:
        cpu_worker.CPUWorker(config, 0, 0, "")
    except ValueError as error:
        refused = str(error)
    assert ("less than desired CPU memory utilization" in refused) == (share > 0.5)
    assert checks.memory(share).status == ("fail" if refused else "warn")
