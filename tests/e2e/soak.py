"""Let many clients ask a small server with trees for a long time, to see that it stays exact and
alive.

As a program: ``python soak.py --minutes 60 --clients 64``. Afterwards, an engine without trees gets
the same requests. The server has to be empty in the end, and its counters have to be right.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import workload
from engine_process import Metrics, Request, Run, series, serve
from memory import Samples, watched
from prometheus_client.parser import text_string_to_metric_families
from serving import Server, fetch, server, wait_until
from soak_clients import Log, Received, prompt_key, questions, soak
from test_metrics import check_consistency

WARM_UP_SECONDS = 360
MOST_GROWTH = 48.0
"""MiB that a process may gain after the warm-up, see `memory.Samples.growth`.

vLLM multiplies matrices with oneDNN, and keeps a compiled product for each of the last 32 numbers
of rows that a layer has seen. Each takes about half a MiB with the embedded pair, so the worker
gains some 400 MiB in the first minutes.
"""
TINY = (
    *("--num-gpu-blocks-override", "40", "--block-size", "32", "--max-num-batched-tokens", "512"),
    *("--enforce-eager", "--reasoning-config", json.dumps(workload.REASONING)),
)
"""Arguments for a cache of 2.5 full contexts, in which 16 sequences preempt each other."""


@dataclass(frozen=True)
class Soaked:
    """The results of a soak.

    ``wrong`` describes the differing answers among the ``repeated`` ones; ``faults`` describes
    other errors.
    """

    log: Log
    memory: Samples
    metrics: Metrics
    repeated: int
    wrong: list[str]
    faults: list[str] = field(default_factory=list)

    def report(self, warm_up: float = WARM_UP_SECONDS) -> str:
        preempted = self.metrics["vllm:num_preemptions_total"]
        growth = self.memory.growth(warm_up)
        lines = [
            f"{len(self.log.received)} answers, {self.log.aborted} of them left in mid-stream, "
            f"{self.log.tokens} tokens, {self.log.restarts} restarts of clients, "
            f"{preempted:.0f} preemptions, {len(self.log.errors)} errors",
            f"{self.repeated} answers repeated without trees: {len(self.wrong)} wrong",
            *self.wrong[:10],
            *self.log.errors[:10],
            *self.faults,
            self.memory.table(),
            f"MiB gained after {warm_up:.0f} s: "
            + ", ".join(f"{name} {mib:+.1f}" for name, mib in growth.items()),
        ]
        return "\n".join(lines)


def run(folder: Path, seconds: float, clients: int, repeat: int, *arguments: str) -> Soaked:
    """Soak a server, and ask ``repeat`` of the answers again."""
    prompts = _prompts(questions())
    with (
        server(
            folder, *TINY, "--reasoning-config", json.dumps(workload.REASONING), *arguments
        ) as served,
        watched(served.process.pid) as memory,
    ):
        log = asyncio.run(soak(served.address, prompts, clients, seconds))
        metrics = _idle(served)
    repeated, wrong = _repeat(log.received, repeat, prompts)
    return Soaked(log, memory, metrics, repeated, wrong, faults(log, metrics))


def _prompts(requests: Sequence[Request]) -> Mapping[str, list[int]]:
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(workload.without_tree()["model"]).encode
    return {prompt_key(each): encode(each.prompt)[: each.keep] for each in requests}


def metrics_of(address: str) -> Metrics:
    """Return a server's metrics, summed over the labels of model and engine."""
    found: Metrics = {}
    for family in text_string_to_metric_families(fetch(f"{address}/metrics")):
        for sample in family.samples:
            name = series(sample.name, sample.labels)
            found[name] = found.get(name, 0.0) + sample.value
    return found


def _idle(served: Server) -> Metrics:
    """Wait until a server has nothing left to do, and return its metrics."""
    busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

    def idle() -> bool:
        found = metrics_of(served.address)
        return not any(found[name] for name in busy)

    wait_until(idle, 60, "an idle server")
    time.sleep(1)
    return metrics_of(served.address)


def faults(
    log: Log, metrics: Metrics, check: Callable[[Metrics], None] = check_consistency
) -> list[str]:
    """Describe counters that contradict each other or the log."""
    found = []
    try:
        check(metrics)
    except AssertionError as error:
        found.append(f"the counters do not agree: {error}")
    generated = metrics["vllm:generation_tokens_total"]
    if generated < log.tokens:
        found.append(f"{generated:.0f} tokens counted of {log.tokens} received")
    ended = {
        name: value
        for name, value in metrics.items()
        if name.startswith("vllm:request_success_total")
    }
    errors = sum(value for name, value in ended.items() if "error" in name)
    if errors:
        found.append(f"requests ended with an error: {ended}")
    if not metrics["vllm:num_preemptions_total"]:
        found.append("no request was preempted")
    return found


def _repeat(
    received: Sequence[Received], most: int, prompts: Mapping[str, list[int]]
) -> tuple[int, list[str]]:
    """Repeat answers on an engine without trees. Return their number, and those that differ."""
    repeatable = [
        each
        for each in received
        if "seed" in each.request.params or each.request.params.get("temperature") == 0
    ]
    random.Random(0).shuffle(repeatable)
    chosen = repeatable[:most]
    asked = {each.request.key: each.request for each in chosen}
    again = [Request(prompts[prompt_key(request)], request.params) for request in asked.values()]
    outputs = serve(workload.without_tree(), {"again": Run(again)}, threads=1)["again"].outputs
    wanted = dict(zip(asked, outputs, strict=True))
    wrong = []
    for each in chosen:
        output = wanted[each.request.key]
        if differs(each, output.tokens):
            wrong.append(
                f"{each.request.params}, prompt of {len(output.prompt)} tokens, "
                f"{'left' if each.aborted else 'ended'}: {each.tokens} != {output.tokens}"
            )
    return len(chosen), wrong


def differs(received: Received, wanted: list[list[int]]) -> bool:
    """Return whether an answer differs. An aborted answer must be a prefix of the wanted one."""
    return any(
        tokens != (expected[: len(tokens)] if received.aborted else expected)
        for tokens, expected in zip(received.tokens, wanted, strict=True)
    )


def failures(
    soaked: Soaked, warm_up: float = WARM_UP_SECONDS, most_growth: float = MOST_GROWTH
) -> list[str]:
    """Describe why a soak failed; empty if it did not."""
    growth = soaked.memory.growth(warm_up)
    return [
        *(["some answers are wrong"] if soaked.wrong else []),
        *(["some requests failed"] if soaked.log.errors else []),
        *soaked.faults,
        *(f"{name} has gained {mib:.0f} MiB" for name, mib in growth.items() if mib > most_growth),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Soak a server with trees.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=20_000, help="most requests to repeat")
    arguments, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        soaked = run(
            Path(folder), arguments.minutes * 60, arguments.clients, arguments.repeat, *others
        )
    print(soaked.report())
    if found := failures(soaked):
        print("FAILED:", "; ".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
