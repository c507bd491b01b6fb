"""Times on a CUDA device, what the device can do at best, and where a result comes from."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

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
    """Hardware, versions, commit, command and time of a result."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "processors": properties.multi_processor_count,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": versions,
        "commit": _output("git", "rev-parse", "HEAD") or os.environ.get("DYNTREE_COMMIT"),
        "uncommitted": bool(_output("git", "status", "--porcelain")),
        "command": sys.argv,
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _output(*command: str) -> str | None:
    """What a command prints; None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() if done.returncode == 0 else None
