"""Measure where a step's time goes on this machine, with the embedded pair.

As a program, it prints the report.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import quantiles

import workload
from engine_process import Request, Result, Run, serve

BATCHES = (1, 16)
REPEATS = 4
NODES = 16
STEPS = 12  # of a run with trees; the first requests end later


def _run(batch: int) -> Run:
    params = {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True}
    return Run([Request(prompt, params) for prompt in workload.PROMPTS[:batch]], batch)


def typical(milliseconds: Iterable[float]) -> float:
    """Return the 20th percentile, because other processes only ever add time."""
    return quantiles(milliseconds, n=5)[0]


@dataclass(frozen=True)
class Speed:
    """Milliseconds per decoding step at one batch size.

    ``v1`` and ``v2`` are plain decoding on vLLM's V1 runner, and on V2 with our kernels. ``step``
    is a step of an engine with trees. ``stages`` is the time of its worker, and ``machinery`` is
    the step without model forwards. ``tokens`` is the number of accepted and bonus tokens per tree.
    """

    v1: float
    v2: float
    step: float
    stages: dict[str, float]
    machinery: float
    tokens: float


def measure() -> dict[int, Speed]:
    """Measure by batch size, with one thread: on a shared core, threads wait for each other."""
    runs = {f"{batch}, {turn}": _run(batch) for turn in range(REPEATS) for batch in BATCHES}
    target = workload.without_tree()["model"]
    engines = {
        "v1": {"model": target},
        "v2": workload.without_tree(),
        "tree": workload.tree(NODES),
    }
    results = {name: serve(arguments, runs, threads=1) for name, arguments in engines.items()}

    def turns(engine: str, batch: int) -> list[Result]:
        return [results[engine][f"{batch}, {turn}"] for turn in range(1, REPEATS)]

    def plain_step(engine: str, batch: int) -> float:
        return typical(1e3 * s for result in turns(engine, batch) for s in result.seconds[2:])

    return {
        batch: Speed(
            plain_step("v1", batch), plain_step("v2", batch), *_of_tree(turns("tree", batch))
        )
        for batch in BATCHES
    }


def _of_tree(results: list[Result]) -> tuple[float, dict[str, float], float, float]:
    steps, machinery = [], []
    stages: dict[str, list[float]] = {}
    for result in results:
        for seconds, of_step in list(zip(result.seconds, result.stages, strict=True))[2:STEPS]:
            steps.append(1e3 * seconds)
            machinery.append(
                1e3 * (seconds - of_step["target"] - of_step["draft"] - of_step["catch_up"])
            )
            for stage, spent in of_step.items():
                stages.setdefault(stage, []).append(1e3 * spent)
    trees = sum(r.metrics["vllm:spec_decode_num_drafts_total"] for r in results)
    accepted = sum(r.metrics["vllm:spec_decode_num_accepted_tokens_total"] for r in results)
    by_stage = {stage: typical(spent) for stage, spent in stages.items()}
    return typical(steps), by_stage, typical(machinery), 1 + accepted / trees


def report(speeds: dict[int, Speed]) -> str:
    load = os.getloadavg()[0]
    lines = [
        f"milliseconds per step, {NODES} nodes, greedy, 1 thread (load of the machine {load:.1f})"
    ]
    for batch, speed in speeds.items():
        stages = ", ".join(f"{stage} {time:.2f}" for stage, time in speed.stages.items())
        engine = speed.step - sum(speed.stages.values())
        lines += [
            f"batch {batch}:",
            f"  plain decode: V1 {speed.v1:.2f}, V2 with our kernels {speed.v2:.2f} "
            f"({speed.v2 / speed.v1:.2f}x)",
            f"  trees: {speed.step:.2f} for {speed.tokens:.2f} tokens per request: {stages}, "
            f"scheduler and engine {engine:.2f}",
            f"  machinery (all but forwards): {speed.machinery:.2f}",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(measure()))  # noqa: T201
