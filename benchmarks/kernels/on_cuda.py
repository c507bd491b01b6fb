"""The benchmark on a CUDA device; `python -m benchmarks.kernels` runs it."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import argparse
import json
import operator
import sys
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from triton import TritonError

from benchmarks.kernels import cases, timing
from dyntree_kernels import dispatch
from dyntree_kernels.contracts import allocate
from dyntree_kernels.cuda.attention import half_precision_tiling, tiling
from dyntree_kernels.cuda.kv_move import KVMover
from dyntree_kernels.cuda.walk import walk

ROWS, CONTEXTS = (16, 32, 64, 256, 512, 1024), (4096, 16384)
BATCHES = ((16, 4096, 8), (32, 4096, 8), (64, 4096, 8), (16, 1024, 32))
"""Rows, context and requests of what is timed with several requests as well."""
FEW = ("triton", "flashinfer", "xqa", "fa3 causal", "cascade")
"""What is timed with one row, and with several requests, as well."""
UNEVEN = (17, 33, 65, 129)
"""Rows of usual trees with their root: those of a head group fill no tile."""
TOLERANCE = 2e-2  # of bfloat16 outputs against the float64 oracle
_LATE = "out of time"
KERNEL_ERRORS = (RuntimeError, ValueError, ImportError, TritonError, AssertionError, TypeError)
"""What CUDA, Triton, the libraries and our own checks raise where a kernel cannot run."""


class Benchmark:
    """Collects entries, and what was left out and why, until `seconds` are over."""

    def __init__(self, seconds: float, flash_attention: str) -> None:
        self._deadline = time.monotonic() + seconds
        self._flash_attention = flash_attention
        self.limits = timing.ceilings(cases.DTYPE)
        self.device = torch.cuda.get_device_name()
        self.attention: list[dict[str, Any]] = []
        self.batches: list[dict[str, Any]] = []
        self.tilings: list[dict[str, Any]] = []
        self.left_out: list[dict[str, Any]] = []

    def runners(self) -> dict[str, Callable[[cases.Batch], cases.Runner]]:
        """Implementations and baselines by name, in the order of their importance."""
        return {
            "triton": cases.triton,
            "fa3 causal": lambda b: cases.flash_attention(b, self._flash_attention),
            "flashinfer": cases.flashinfer,
            "cascade": lambda b: cases.cascade(b, self._flash_attention),
            "xqa": cases.xqa,
            "triton unmasked": cases.triton_unmasked,
            "flashinfer unmasked": lambda b: cases.flashinfer(b, masked=False),
            "xformers": cases.xformers,
        }

    def measure_all(self) -> Iterator[None]:
        """Time a shape at each turn, with the cascade and XQA last: they have not run on a GPU yet,
        and after a fault nothing else can."""
        others = [name for name in self.runners() if name not in ("cascade", "xqa")]
        for names in (others, ["cascade"], ["xqa"]):
            for context in CONTEXTS:
                for rows in ROWS:
                    self.measure(rows, context, names)
                    yield
                self.measure(1, context, [name for name in names if name in FEW])
                yield
            for shape in BATCHES:
                self.measure(*shape[:2], [name for name in names if name in FEW], shape[2])
                yield

    def measure(self, rows: int, context: int, names: Collection[str], requests: int = 1) -> None:
        """Time these implementations on one shape; each is compared with the oracle first."""
        batch = cases.make_batch(rows, context, requests)
        gone = {e["implementation"] for e in self.left_out if e["reason"].startswith("Unavailable")}
        for name, make in self.runners().items():
            if name in names and name not in gone:
                entry = {"implementation": name, "rows": rows, "context": context}
                entry |= {"requests": requests} if requests > 1 else {}
                if time.monotonic() > self._deadline:
                    self.left_out.append({**entry, "reason": _LATE})
                    continue
                self._add(self.attention if requests == 1 else self.batches, entry, batch, make)
        del batch
        torch.cuda.empty_cache()

    def measure_tilings(self) -> Iterator[None]:
        """Time our kernel on trees that fill no tile, in the tiles that it chooses and in others.

        The fastest should be what `tiling` chooses.
        """
        for rows in UNEVEN:
            chosen = tiling(cases.HEAD_SIZE, rows * cases.GROUP, cases.DTYPE.itemsize)
            for context in CONTEXTS:
                batch = cases.make_batch(rows, context)
                for tiles in (half_precision_tiling(64), half_precision_tiling(128)):
                    entry = {
                        "implementation": f"triton, {tiles.block_m} rows a tile",
                        "rows": rows, "context": context, "chosen": tiles == chosen,
                    }  # fmt: skip
                    self._add(self.tilings, entry, batch, partial(cases.triton, tiles=tiles))
                    yield

    def _add(
        self,
        entries: list[dict[str, Any]],
        entry: dict[str, Any],
        batch: cases.Batch,
        make: Callable[[cases.Batch], cases.Runner],
    ) -> None:
        """Add an ``entry`` with its times; if the kernel cannot run, note that it is left out."""
        try:
            times = self._times(batch, make(batch))
        # A kernel that fails must not take the others' results with it.
        except KERNEL_ERRORS as error:
            self.left_out.append({**entry, "reason": f"{type(error).__name__}: {error}"})
        else:
            entries.append(entry | times)

    def _times(self, batch: cases.Batch, runner: cases.Runner) -> dict[str, Any]:
        batch.out.fill_(torch.nan)
        runner.launch(0)
        error = batch.error() if runner.exact else None
        if error is not None and not error < TOLERANCE:
            raise RuntimeError(f"differs from the oracle by {error}")

        def all_layers() -> None:
            for layer in range(cases.LAYERS):
                runner.launch(layer)

        time_all = timing.replay_microseconds if runner.captured else _eager
        microseconds = time_all(all_layers) / cases.LAYERS
        floor = max(
            batch.bytes / self.limits["terabytes_per_second"],
            batch.operations / self.limits["teraflops"],
        )
        return {
            "device": self.device,
            "heads": cases.HEADS,
            "group": cases.GROUP,
            "head_size": cases.HEAD_SIZE,
            "dtype": str(cases.DTYPE).removeprefix("torch."),
            "microseconds": microseconds,
            "terabytes_per_second": batch.bytes / microseconds / 1e6,
            "teraflops": batch.operations / microseconds / 1e6,
            "efficiency": floor / 1e6 / microseconds,
            "max_error": error,
            "plan_microseconds": timing.host_microseconds(runner.plan) if runner.plan else None,
        }


def _eager(run: Callable[[], object]) -> float:
    run()
    return timing.events_microseconds(run, 3)


def small_kernels() -> dict[str, float]:
    """Microseconds of a KV move of 12 rows in all layers, and of a walk through 32 trees."""
    mover = KVMover(list(cases.make_batch(64, 4096).caches))
    path = torch.arange(1, 37, 3, device="cuda")[None]
    root = torch.zeros(1, dtype=torch.int64, device="cuda")
    slots = torch.arange(64, device="cuda") + 16
    batch, trees = cases.walk_batch(32, 64)
    found = allocate(32, 64, int(trees.depths.max()), slots.device, ranked=True)

    def walk_all() -> None:
        walk(batch, trees, found, ranked=True)

    return {
        "kv_move, 12 rows, 32 layers": timing.replay_microseconds(lambda: mover(path, root, slots)),
        "walk, 32 × 64 nodes": timing.replay_microseconds(walk_all),
    }


def print_table(result: dict[str, Any]) -> None:
    """Print the result as tables."""
    write = sys.stdout.write
    limits = result["ceilings"]
    write(
        f"\n{result['provenance']['device']}: copy {limits['terabytes_per_second']:.2f} TB/s, "
        f"product {limits['teraflops']:.0f} TFLOP/s\n"
    )
    header = f"{'context':>8}{'rows':>6}  {'implementation':24}{'µs/layer':>10}{'TB/s':>7}"
    write(f"{header}{'TFLOP/s':>9}{'of best':>9}{'error':>10}{'plan µs':>9}\n")
    order = operator.itemgetter("requests", "context", "rows", "microseconds")
    every = [{"requests": 1, **entry} for entry in result["attention"] + result["batches"]]
    for e in sorted(every, key=order):
        name = e["implementation"] + (f", {e['requests']} times" if e["requests"] > 1 else "")
        error = "" if e["max_error"] is None else f"{e['max_error']:.1e}"
        plan = "" if e["plan_microseconds"] is None else f"{e['plan_microseconds']:.0f}"
        write(
            f"{e['context']:8}{e['rows']:6}  {name:24}{e['microseconds']:10.1f}"
            f"{e['terabytes_per_second']:7.2f}{e['teraflops']:9.0f}{e['efficiency']:9.0%}"
            f"{error:>10}{plan:>9}\n"
        )
    for entry in result["tilings"]:
        write(
            f"{entry['implementation']}, {entry['rows']} rows after {entry['context']}: "
            f"{entry['microseconds']:.1f} µs{', as chosen' if entry['chosen'] else ''}\n"
        )
    for name, microseconds in result["small"].items():
        write(f"{name}: {microseconds:.1f} µs\n")
    for entry in result["left_out"]:
        write(f"left out: {entry}\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("kernels.json"), help="result file")
    parser.add_argument("--seconds", type=float, default=300, help="start no measurement later")
    parser.add_argument(
        "--flash-attention", default="flash_attn_interface", metavar="MODULE",
        help="where flash_attn_varlen_func with block tables and fa_version is",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    benchmark = Benchmark(options.seconds, options.flash_attention)
    result: dict[str, Any] = {
        "provenance": timing.provenance(),
        "ceilings": benchmark.limits,
        "attention": benchmark.attention,
        "batches": benchmark.batches,
        "tilings": benchmark.tilings,
        "small": {},
        "left_out": benchmark.left_out,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for _ in chain(benchmark.measure_all(), benchmark.measure_tilings()):
        # After every shape: a kernel that hangs or breaks the CUDA context ends the process.
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    result["small"] = small_kernels()
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print_table(result)
    if any(entry["reason"] == _LATE for entry in benchmark.left_out):
        sys.stdout.write("attention: auto follows no measurement that ran out of time\n")
        return
    table = dispatch.write_table(benchmark.device, benchmark.attention)
    sys.stdout.write(f"attention: auto follows {table} on this GPU\n")
