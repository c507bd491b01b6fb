"""Trees against vLLM without them on this machine's device: who answers otherwise, and by how much.

As a program it writes the report: ``python device_identity.py FILE NOTE [DTYPE ...]``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import workload
from engine_process import Result, Run, serve
from margins import MARGINS, Verdict, places, scores_of, scoring, verdict

from benchmarks.acceptance.noise import perturb_on
from dyntree_plugin.provenance import provenance

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
    "everything served": Run([r for r in workload.EVERYTHING[::3] if "n" not in r.params]),
}
"""In bf16 without the last: the margin rule does not cover what its requests use."""
CONTROLS = {name: Run(REQUESTS[:32], sabotage=name) for name in workload.sabotage.NAMES}
YARDSTICK = Run(REQUESTS, batch=3)
STRICT = {
    "nothing waits, first steps": Run(REQUESTS[:16]),
    "nothing waits": Run(REQUESTS[:32], sabotage="waiting_is_an_error"),
}
"""On CUDA: kernels are compiled in the first steps, which may wait."""

# Those of 16 nodes are whole, so that controls break what they should; the others are as a user has
# them.
TREES = {
    "tree of 16": workload.tree(16),
    "tree of 64": workload.with_options(64, node_budget=64, max_depth=8, width=8),
    "tree of 16, eager": workload.tree(16) | {"enforce_eager": True},
    "tree of 14, the target as draft": workload.tree(
        14, draft="target", width=8, max_depth=3, children=2
    ),
    **({"tree of 16, waiting is an error": workload.with_options()} if ON_CUDA else {}),
}


@dataclass(frozen=True)
class Row:
    """What one engine did in one run; a ``control`` has to be caught."""

    dtype: str
    engine: str
    run: str
    control: bool
    verdict: Verdict

    @property
    def passed(self) -> bool:
        return (self.verdict.unexcused > 0) == self.control


@dataclass(frozen=True)
class Broken:
    """An engine that gave no answers, and why."""

    dtype: str
    engine: str
    reason: str
    passed: bool = False


def compare(dtypes: Sequence[str], at_once: int) -> list[Row | Broken]:
    """Serve everything with every engine, so many at a time, and judge what differs."""
    with ThreadPoolExecutor(at_once) as pool:
        started = {
            (dtype, name): pool.submit(_serve, engine, _runs(name, dtype), dtype)
            for dtype in dtypes
            for name, engine in {PLAIN: _without_tree(), **TREES}.items()
        }
        results: dict[tuple[str, str], dict[str, Result]] = {}
        broken: list[Row | Broken] = []
        for key, future in started.items():
            try:
                results[key] = future.result()
            except RuntimeError as error:
                broken.append(Broken(*key, str(error)))
        judged = [
            pool.submit(_judge, dtype, results) for dtype in dtypes if (dtype, PLAIN) in results
        ]
        return [*(row for future in judged for row in future.result()), *broken]


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
    if ON_CUDA:  # where vLLM's own worker runs its V2 runner
        del arguments["worker_cls"]
    return arguments | {"max_logprobs": -1}


def _serve(engine: Mapping[str, Any], runs: Mapping[str, Run], dtype: str) -> dict[str, Result]:
    own = {"enforce_eager": False, "gpu_memory_utilization": 0.1} if ON_CUDA else {}
    return serve({**own, **engine, "dtype": dtype}, runs, threads=1)


def _judge(dtype: str, results: Mapping[tuple[str, str], Mapping[str, Result]]) -> list[Row]:
    everything = _runs(PLAIN, dtype)[EVERY]
    pairs = zip(everything.requests, results[dtype, PLAIN][EVERY].outputs, strict=True)
    wanted = {request.key: output for request, output in pairs if output is not None}
    served = {
        (engine, name): (run, result[name])
        for (of, engine), result in results.items()
        if of == dtype
        for name, run in _runs(engine, dtype).items()
        if name != EVERY
    }
    found = {key: places(run, result, wanted) for key, (run, result) in served.items()}
    apart = [place for each in found.values() for place in each if place is not None]
    asked = scoring(apart, VOCABULARY)
    answers = _serve(_without_tree(), {SCORING: asked}, dtype)[SCORING].outputs if apart else []
    scores = iter(scores_of([answer for answer in answers if answer is not None]))
    rows = []
    for (engine, name), (run, _) in served.items():
        own = found[engine, name]
        known = [next(scores) for place in own if place is not None]
        outputs = [wanted[request.key] for request in run.requests]
        judged = verdict(own, outputs, known, noise, MARGINS[dtype])
        rows.append(Row(dtype, engine, name, name in CONTROLS, judged))
    return rows


def noise(seed: int, position: int) -> torch.Tensor:
    """The sampler's, of every token."""
    perturbed = perturb_on(DEVICE)(
        torch.zeros(1, VOCABULARY, device=DEVICE),
        torch.ones(1, device=DEVICE),
        torch.tensor([seed], device=DEVICE),
        torch.tensor([position], device=DEVICE),
    )
    return perturbed[0].cpu()


def report(rows: Sequence[Row | Broken]) -> str:
    """A line per run."""
    lines = [
        f"{'':9}{'engine':33}{'run':22}{'answers':>8}{'tokens':>8}{'other':>7}{'excused':>8}"
        f"{'largest gap':>12}"
    ]
    for row in rows:
        if isinstance(row, Broken):
            last = row.reason.strip().splitlines()[-1]
            lines.append(f"{row.dtype:9}{row.engine:33}FAILED to serve: {last}")
            continue
        found = row.verdict
        wanted = "must differ" if row.control else ""
        largest = f"{max(found.gaps):.4f}" if found.gaps else "–"
        lines.append(
            f"{row.dtype:9}{row.engine:33}{row.run:22}{found.requests:8}{found.tokens:8}"
            f"{found.excused + found.unexcused:7}{found.excused:8}{largest:>12}"
            f"  {'ok' if row.passed else 'FAILED'} {wanted}".rstrip()
        )
    margins = ", ".join(f"{margin} in {dtype}" for dtype, margin in MARGINS.items())
    lines.append(f"Excused: the two tokens are at most so many logits apart: {margins}.")
    return "\n".join(lines)


def as_json(rows: Sequence[Row | Broken], seconds: float, note: str) -> dict[str, Any]:
    return {
        "provenance": provenance(),
        "note": note,
        "margins": MARGINS,
        "seconds": seconds,
        "runs": [
            {"dtype": row.dtype, "engine": row.engine, "run": row.run, "control": row.control,
             "passed": row.passed, **row.verdict.as_json()}
            for row in rows if isinstance(row, Row)
        ],
        "failed": [asdict(row) for row in rows if isinstance(row, Broken)],
    }  # fmt: skip


def main(file: str, note: str, *dtypes: str) -> None:
    began = time.monotonic()
    rows = compare(dtypes or tuple(MARGINS), at_once=max((os.cpu_count() or 1) // 2, 1))
    found = as_json(rows, time.monotonic() - began, note)
    Path(file).write_text(json.dumps(found, indent=1) + "\n")
    print(report(rows))  # noqa: T201
    sys.exit(not all(row.passed for row in rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
