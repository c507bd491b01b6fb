"""Where a step's time goes on this machine, with the embedded pair.

As a program it prints the report.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import workload
from engine_process import Request, Result, Run, serve

BATCHES = (1, 16)
REPEATS = 4
NODES = 16
STAGE = "vllm:dyntree_stage_seconds_total{stage=%s}"


def _run(batch: int) -> Run:
    params = {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True}
    return Run([Request(prompt, params) for prompt in workload.PROMPTS[:batch]], batch)


@dataclass(frozen=True)
class Speed:
    """Milliseconds per engine step at one batch size.

    ``v1``, ``v2``: plain decode on vLLM's V1 runner and on V2 with our kernels, median step.
    ``step``: of an engine with trees, on average; ``stages``: what the worker spent of it;
    ``tokens``: per step and request.
    """

    v1: float
    v2: float
    step: float
    stages: dict[str, float]
    tokens: float

    @property
    def forwards(self) -> float:
        return self.stages["target"] + self.stages["draft"]

    @property
    def machinery(self) -> float:
        """Everything but model forwards and their attention."""
        return self.step - self.forwards


def measure() -> dict[int, Speed]:
    """By batch size. Of several runs the fastest counts: a busy machine only ever adds time."""
    runs = {f"{batch}, {turn}": _run(batch) for turn in range(REPEATS) for batch in BATCHES}
    target = workload.without_tree()["model"]
    engines = {
        "v1": {"model": target},
        "v2": workload.without_tree(),
        "tree": workload.tree(NODES),
    }
    results = {name: serve(arguments, runs) for name, arguments in engines.items()}

    def turns(engine: str, batch: int) -> list[Result]:
        # The first warms caches up.
        return [results[engine][f"{batch}, {turn}"] for turn in range(1, REPEATS)]

    def plain_step(engine: str, batch: int) -> float:
        return min(1e3 * median(result.seconds) for result in turns(engine, batch))

    found = {}
    for batch in BATCHES:
        speeds = [_tree_speed(result, batch) for result in turns("tree", batch)]
        step, stages, tokens = min(speeds, key=lambda s: s[0] - s[1]["target"] - s[1]["draft"])
        found[batch] = Speed(
            plain_step("v1", batch), plain_step("v2", batch), step, stages, tokens
        )
    return found


def _tree_speed(result: Result, batch: int) -> tuple[float, dict[str, float], float]:
    from dyntree_plugin.engine.timing import STAGES

    steps = len(result.seconds)
    stages = {stage: 1e3 * result.metrics[STAGE % stage] / steps for stage in STAGES}
    tokens = result.metrics["vllm:generation_tokens_total"] / steps / batch
    return 1e3 * sum(result.seconds) / steps, stages, tokens


def report(speeds: dict[int, Speed]) -> str:
    lines = ["", f"milliseconds per step, {NODES} nodes, greedy, 64 tokens"]
    for batch, speed in speeds.items():
        stages = ", ".join(f"{stage} {time:.2f}" for stage, time in speed.stages.items())
        engine = speed.step - sum(speed.stages.values())
        lines += [
            f"batch {batch}:",
            f"  plain decode: V1 {speed.v1:.2f}, V2 with our kernels {speed.v2:.2f} "
            f"({speed.v2 / speed.v1:.2f}x)",
            f"  trees: step {speed.step:.2f} for {speed.tokens:.2f} tokens per request: "
            f"{stages}, scheduler and engine {engine:.2f}",
            f"  machinery (all but forwards): {speed.machinery:.2f}",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(measure()))  # noqa: T201
