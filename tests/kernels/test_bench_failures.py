"""How the CUDA benchmark handles kernels that fail, as far as this needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the benchmark runs Triton kernels")

from triton.runtime.errors import OutOfResources

from benchmarks.kernels import on_cuda as bench
from benchmarks.kernels.cases import UnavailableError

Benchmark = Callable[[Exception, float], bench.Benchmark]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Benchmark:
    """Return a function that makes a benchmark of two implementations. The first one raises."""
    monkeypatch.setattr(bench.timing, "ceilings", lambda dtype: {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no device")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench.cases, "make_batch", lambda rows, context: "batch")

    def make(error: Exception, seconds: float) -> bench.Benchmark:
        def broken(batch: Any) -> Any:
            raise error

        runners = {"broken": broken, "sound": lambda batch: 7.0}
        monkeypatch.setattr(bench.Benchmark, "runners", lambda self: runners)
        monkeypatch.setattr(
            bench.Benchmark, "_times", lambda self, batch, runner: {"microseconds": runner}
        )
        return bench.Benchmark(seconds, "flash_attn_interface")

    return make


@pytest.mark.parametrize(
    "error",
    [
        OutOfResources(300_000, 232_448, "shared memory"),
        ImportError("libcudart.so.12"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_kernel_that_fails_is_left_out_with_its_reason(
    error: Exception, benchmark: Benchmark
) -> None:
    run = benchmark(error, 60)
    run.measure(16, 4096)
    assert [(e["implementation"], e["microseconds"]) for e in run.attention] == [("sound", 7.0)]
    (left_out,) = run.left_out
    assert (left_out["rows"], left_out["context"]) == (16, 4096)
    assert left_out["reason"] == f"{type(error).__name__}: {error}"


def test_what_is_not_there_is_asked_for_once_and_a_failure_again(benchmark: Benchmark) -> None:
    for error, times in ((UnavailableError("not installed"), 1), (RuntimeError("launch"), 2)):
        run = benchmark(error, 60)
        run.measure(16, 4096)
        run.measure(64, 4096)
        assert len(run.left_out) == times
