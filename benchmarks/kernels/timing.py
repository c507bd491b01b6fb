"""Times on a CUDA device, what the device can do at best, and where a result comes from."""

from __future__ import annotations

import importlib.metadata
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dyntree_plugin.provenance import provenance as of_result

PACKAGES = ("torch", "triton", "flashinfer-python", "vllm", "xformers", "numpy")


def events_microseconds(run: Callable[[], object], repeats: int) -> float:
    """Median time of `run` on the device."""
    times: list[float] = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def replay_microseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a replay of the CUDA graph of `run`."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    return events_microseconds(graph.replay, repeats)


def host_microseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Median wall time of `run` until the device has done what it asked for."""
    times: list[float] = []
    run()
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def ceilings(dtype: torch.dtype) -> dict[str, float]:
    """Bytes per second of a copy and operations per second of a matrix product, in 1e12."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = replay_microseconds(lambda: target.copy_(source))
    a, b = torch.randn(2, 8192, 8192, dtype=dtype, device="cuda")
    product = torch.empty_like(a)
    multiplied = replay_microseconds(lambda: torch.mm(a, b, out=product))
    return {
        "terabytes_per_second": 2 * source.numel() / copied / 1e6,
        "teraflops": 2 * 8192**3 / multiplied / 1e6,
    }


def provenance() -> dict[str, Any]:
    """Return what `dyntree_plugin.provenance` says of a result, and more of the device."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    properties = torch.cuda.get_device_properties(0)
    return {
        **of_result(),
        "packages": versions,
        "device": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "processors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }
