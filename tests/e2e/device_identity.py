"""Compare trees with vLLM without trees on this machine's device: which tokens differ, and by how
much.

As a program, it writes the report: ``python device_identity.py FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import heads
import torch
import workload
from engine_process import START_AND_WORK_SECONDS, Result, Run, serve
from features import FOR_A_CPU
from identity_report import Broken, Record, Row, report
from margins import Place, Scores, places, scores_of, scoring, verdict

from benchmarks.real.margins import MARGINS
from benchmarks.serve.shapes import grow
from dyntree_plugin.pair.models import Shape
from dyntree_plugin.tree.perturb import perturb_on

ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
VOCABULARY = json.loads((Path(workload.pair.paths()["target"]) / "config.json").read_text())[
    "vocab_size"
]
PLAIN, EVERY, SCORING = "no speculation", "all", "scores"

REQUESTS = workload.each_kind(range(96))
LONG = workload.long_each_kind(range(100, 112), 300)
RUNS = {
    "batch 16": Run(REQUESTS),
    "batch 1": Run(REQUESTS[:12], batch=1),
    "long prompts": Run(LONG),
    "prompts in the cache": Run(LONG),
    "everything served": Run(
        [r for r in workload.EVERYTHING[::3] if "n" not in r.params and r not in FOR_A_CPU]
    ),
}
"""Runs of most engines. The last one is for fp32 only, because the margin rule does not cover all
of its sampling parameters."""
CONTROLS = {name: Run(REQUESTS[:32], sabotage=name) for name in workload.sabotage.NAMES}
YARDSTICK = Run(REQUESTS, batch=3)
STRICT = {
    "nothing waits, first steps": Run(REQUESTS[:16]),
    "nothing waits": Run(REQUESTS[:32], sabotage="waiting_is_an_error"),
}
"""Runs that fail if the host waits for the device; on CUDA only. The first one is exempt because it
compiles kernels."""

# The trees of 16 nodes are whole, so that the controls break them. Others use a user's options.
TREES = {
    "tree of 16": workload.tree(16),
    "tree of 64": workload.with_options(64, node_budget=64, max_depth=8, width=8),
    "tree of 16, a head as draft": workload.with_head("random", node_budget=16, budget="fixed"),
    "tree of 16, eager": workload.tree(16) | {"enforce_eager": True},
    "tree of 14, the target as draft": workload.tree(
        14, draft="target", width=8, max_depth=3, children=2
    ),
    **({"tree of 16, waiting is an error": workload.with_options()} if ON_CUDA else {}),
}
HEADS_OF_128 = Shape(hidden=256, intermediate=704, layers=6, heads=16, kv_heads=4, head_dim=128)
"""A shape that every kernel of tree attention serves; `shapes.grow` makes the target so."""
KERNELS = {"cascade": "cascade", "FlashInfer": "flashinfer", "XQA": "auto"}
"""Values of the option `attention` by which trees of that target get another kernel than Triton's;
XQA by a table of times, in which there is nothing else."""
if ON_CUDA:
    has_flashinfer = find_spec("flashinfer") is not None
    names = [name for name in KERNELS if has_flashinfer or name == "cascade"]
    TREES |= {f"tree of 16, {n}": workload.tree(16, attention=KERNELS[n]) for n in names}


def compare(
    dtype: str,
    engines: Sequence[str],
    record: Record,
    at_once: int,
    seconds_left: Callable[[], float] = lambda: START_AND_WORK_SECONDS,
) -> None:
    """Serve with the engines that ``record`` lacks, and judge what differs.

    ``at_once`` engines run at a time. Each is recorded as soon as it has been judged. An engine
    that takes longer than ``seconds_left`` has failed.
    """
    left = [name for name in engines if not record.holds(dtype, name)]
    if not left:
        return
    device = Device(dtype, seconds_left)
    with ThreadPoolExecutor(at_once) as pool:
        # The plain engine comes first, so that it has a thread: all others wait for it.
        plain = pool.submit(device.serve, _without_tree(), _runs(PLAIN, dtype))
        judged = {pool.submit(_rows, device, name, plain): name for name in left}
        for future in as_completed(judged):
            try:
                record.add(future.result())
            except (RuntimeError, ValueError) as error:
                record.add([Broken(dtype, judged[future], str(error))])


def _runs(engine: str, dtype: str) -> dict[str, Run]:
    if engine == PLAIN:
        asked = {r.key: r for run in (*RUNS.values(), *CONTROLS.values()) for r in run.requests}
        return {EVERY: Run(list(asked.values())), "in batches of 3": YARDSTICK}
    if "waiting" in engine:
        return STRICT
    runs = {k: run for k, run in RUNS.items() if dtype == "float32" or k != "everything served"}
    if "target as draft" in engine:
        runs = {"batch 16": RUNS["batch 16"]}
    return {**runs, **CONTROLS} if engine == "tree of 16" else runs


def _without_tree() -> dict[str, Any]:
    arguments = workload.without_tree()
    if ON_CUDA:  # vLLM's own worker runs its V2 runner there
        del arguments["worker_cls"]
    return arguments | {"max_logprobs": -1}


@dataclass(frozen=True)
class Device:
    """Start engines of one ``dtype``."""

    dtype: str
    seconds_left: Callable[[], float]

    def serve(
        self, engine: Mapping[str, Any], runs: Mapping[str, Run], **variables: str
    ) -> dict[str, Result]:
        own = {"enforce_eager": False, "gpu_memory_utilization": 0.1} if ON_CUDA else {}
        arguments = {**own, **engine, "dtype": self.dtype}
        seconds = max(self.seconds_left(), 1.0)
        variables |= exact_products(self.dtype)
        return serve(arguments, runs, threads=1, seconds=seconds, **variables)


def exact_products(dtype: str) -> dict[str, str]:
    """Return the environment variables that make Triton multiply float32 exactly, as the tree
    kernels do.

    vLLM's attention leaves the precision to Triton, which takes TF32 on a GPU that has it. Rounding
    would then differ between single rows and trees by ten bits of mantissa.
    """
    if dtype != "float32":
        return {}
    cache = os.environ.get("TRITON_CACHE_DIR") or str(Path.home() / ".triton" / "cache")
    return {"TRITON_F32_DEFAULT": "ieee", "TRITON_CACHE_DIR": f"{cache}-ieee"}


def _rows(device: Device, name: str, plain: Future[dict[str, Result]]) -> list[Row | Broken]:
    """Return the verdicts on one engine, one row per run.

    If the scores fail, these are the runs without a difference, and what was not judged.
    """
    if name == PLAIN:
        own = plain.result()
    else:
        with _arguments(name) as arguments:
            own = device.serve(arguments, _runs(name, device.dtype))
    everything = _runs(PLAIN, device.dtype)[EVERY]
    pairs = zip(everything.requests, plain.result()[EVERY].outputs, strict=True)
    wanted = {request.key: output for request, output in pairs if output is not None}
    runs = {key: run for key, run in _runs(name, device.dtype).items() if key != EVERY}
    found = {key: places(run, own[key], wanted) for key, run in runs.items()}
    apart = [place for each in found.values() for place in each if place is not None]
    rows: list[Row | Broken] = []
    try:
        scores = iter(_scores(device, apart))
    except RuntimeError as error:
        why = f"{len(apart)} answers differ and were not judged: {str(error).splitlines()[-1]}"
        rows.append(Broken(device.dtype, name, why))
        runs = {key: run for key, run in runs.items() if not any(found[key])}
        scores = iter(())
    for key, run in runs.items():
        known = [next(scores) for place in found[key] if place is not None]
        outputs = [wanted[request.key] for request in run.requests]
        judged = verdict(found[key], outputs, known, noise, MARGINS[device.dtype])
        rows.append(Row(device.dtype, name, key, key in CONTROLS, judged))
    return rows


@contextmanager
def _arguments(name: str) -> Iterator[dict[str, Any]]:
    """Yield the arguments of an engine; models that it needs last as long as this context."""
    arguments, kernel = TREES[name], _kernel(name)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if "a head" in name:
            head = {"model": str(heads.random_head(folder))}
            arguments = arguments | {"speculative_config": arguments["speculative_config"] | head}
        if kernel:
            grow(workload.pair.paths()["target"], HEADS_OF_128, folder / "target")
            # A module of XQA is for one size of blocks.
            arguments = arguments | {"model": str(folder / "target"), "block_size": 16}
        if kernel == "XQA":
            options = arguments["additional_config"]["dyntree"]
            table = {"kernel_table": str(_table_of_xqa(folder / "table.json"))}
            arguments = arguments | {"additional_config": {"dyntree": options | table}}
        yield arguments


def _kernel(engine: str) -> str | None:
    """Return which of `KERNELS` an engine has; they are for 16-bit types."""
    last = engine.rpartition(", ")[2]
    return last if last in KERNELS else None


def _table_of_xqa(path: Path) -> Path:
    of = {"device": torch.cuda.get_device_name(), "group": 4, "head_size": 128, "dtype": "bfloat16"}
    at = {"rows": 16, "context": 4096, "microseconds": 1.0, "plan_microseconds": None}
    path.write_text(json.dumps({"attention": [{"implementation": "xqa", **of, **at}]}))
    return path


def _scores(device: Device, apart: Sequence[Place]) -> list[Scores]:
    """Return the scores at the places where tokens differ, computed by the engine without trees."""
    if not apart:
        return []
    answers = device.serve(_without_tree(), {SCORING: scoring(apart, VOCABULARY)})[SCORING].outputs
    return scores_of([answer for answer in answers if answer is not None])


def noise(seed: int, position: int) -> torch.Tensor:
    """Return the sampler's noise [vocabulary] of a seed and a position."""
    perturbed = perturb_on(DEVICE)(
        torch.zeros(1, VOCABULARY, device=DEVICE),
        torch.ones(1, device=DEVICE),
        torch.tensor([seed], device=DEVICE),
        torch.tensor([position], device=DEVICE),
    )
    return perturbed[0].cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="Report; engines that it holds do not run again.")
    parser.add_argument("--note", default="", help="Text to store in the report.")
    parser.add_argument("--dtype", choices=MARGINS, default="bfloat16")
    parser.add_argument("--engine", choices=(PLAIN, *TREES), action="append")
    parser.add_argument("--seconds", type=float, default=START_AND_WORK_SECONDS)
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    record = Record(given.file, given.note)
    every = [name for name in (PLAIN, *TREES) if given.dtype != "float32" or not _kernel(name)]
    engines, at_once = given.engine or every, max((os.cpu_count() or 1) // 2, 2)
    compare(given.dtype, engines, record, at_once, lambda: end - time.monotonic())
    rows = [row for row in record.found if row.dtype == given.dtype and row.engine in engines]
    print(report(rows))  # noqa: T201
    sys.exit(not all(row.passed for row in rows))


if __name__ == "__main__":
    main()
