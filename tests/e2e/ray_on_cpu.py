"""vLLM's executor of Ray on a CPU, for which vLLM's CPU platform names no resource of Ray.

`RayOnCPU` counts ranks with a resource of Ray's that is not a device, and leaves everything else to
vLLM: its actors, message queues, environment variables and watch over the actors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import ray
from ray.cluster_utils import Cluster
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2

RANK = "rank_of_vllm"
"""Resource of Ray; every rank takes one."""
EXECUTOR = "ray_on_cpu.RayOnCPU"
"""For ``distributed_executor_backend``."""


class CPURayWorkerProc(ray_executor_v2.RayWorkerProc):
    """An actor without devices."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), []


class RayOnCPU(ray_executor_v2.RayExecutorV2):
    """vLLM's executor, with ranks in place of devices."""

    def _init_executor(self) -> None:
        module: Any = ray_executor_v2
        with (
            mock.patch.object(type(current_platform), "ray_device_key", RANK),
            mock.patch.object(module, "RayWorkerProc", CPURayWorkerProc),
        ):
            super()._init_executor()


def kill_an_actor() -> None:
    """Kill the process of a rank in a `cluster` that this process runs."""
    running = f"ray::{CPURayWorkerProc.__name__}"
    processes = psutil.Process().children(recursive=True)
    actors = [p for p in processes if " ".join(p.cmdline()).startswith(running)]
    actors[-1].kill()


@contextmanager
def cluster(nodes: int, **variables: str) -> Iterator[str]:
    """Run Ray's nodes on this machine, each with room for one rank; yield the cluster's address.

    ``variables`` extend the environment of the nodes.
    """
    paths = str(Path(__file__).parent), os.environ.get("PYTHONPATH")
    path = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with mock.patch.dict(os.environ, path | variables):
        found = Cluster()
        try:
            for _ in range(nodes):
                found.add_node(
                    num_cpus=1, resources={RANK: 1}, object_store_memory=80 << 20, dashboard_port=0
                )
            yield found.address
        finally:
            found.shutdown()
