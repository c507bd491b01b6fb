"""What limits a step, the host or the device: python -m benchmarks.serve.limits RESULT [--help]

For no speculation, a chain and trees of an exact shape: the time of a step, the host's part of it,
what the device needs if the host is ahead, by stage, steps before which the device was idle, and
kernels. Expected times of `limit_model` stand beside them. No draft is accepted, so that every step
of a run is alike.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serve import exact, limit_model
from benchmarks.serve.shared import starts
from dyntree_plugin import pair
from dyntree_plugin.commands.bench import plan
from dyntree_plugin.commands.bench.results import Cell
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.pool import Pool
from dyntree_plugin.commands.loads.requests import Request
from dyntree_plugin.commands.loads.runs import Engine
from dyntree_plugin.provenance import provenance
from dyntree_plugin.tune.files import whole

LEVELS = 8
"""Deepest level of a tree; it takes as many draft forwards."""
_BYTES = 33 * 4096
"""Bytes of a position in the caches of the target's layers and the head's."""
STEPS = {"host": 200, "floor": 12, "kernels": 6}
"""Steps of a run, by what is watched (`watching.HOW`)."""


def engines(context: int, batches: Sequence[int], chain: int, trees: Sequence[int]) -> list[Engine]:
    """Return the engines to watch, of Llama-3.1-8B and its EAGLE-3 head."""
    target, head = exact.exact("llama-8b", pair.paths()["target"])
    cells = [Cell(prompts="", temperature=0.0, batch=batch) for batch in batches]
    own = {"budget": "fixed", "lookup": "off"}
    options = [{"node_budget": each, "max_depth": min(each, LEVELS), **own} for each in trees]
    of_trees = plan.named_trees(options, max(trees))
    longest = context + max(STEPS.values()) + 1
    size = max(batches) * (longest + 4 * max(trees)) * _BYTES
    # vLLM wants its share of the memory free; what an engine takes is its weights and the cache.
    room = {"kv_cache_memory_bytes": size, "gpu_memory_utilization": 0.05}
    models = plan.Models(str(target), str(head), exact.ARGUMENTS | room, method="eagle3")
    return plan.engines(models, cells, longest, chains={"greedy": [chain]}, trees=of_trees)


def load_of(engine: Engine, batch: int, context: int, watched: str, steps: int) -> Load:
    """Return requests of ``context`` tokens each that end after so many steps."""
    prompts = [[1 + (7 * row + 3 * at) % 500 for at in range(context)] for row in range(batch)]
    tokens = engine.budget if engine.kind != "plain" else None
    requests = [Request(prompt) for prompt in prompts]
    return Load(requests, batch, 0.0, steps + 1, told=(tokens, None, watched))


def watched(engine: Engine, server: Any, batch: int, context: int) -> Iterator[tuple[str, Any]]:
    """Yield what was seen in each way of watching, after a run that warms up."""
    server.serve(load_of(engine, batch, context, "host", 8))
    for how, steps in STEPS.items():
        run, _ = server.serve(load_of(engine, batch, context, how, steps))
        seen = {**run.told}
        if how != "kernels":
            seen["step_ms"], seen["stages_ms"] = run.step_ms, run.stages_ms
        yield how, seen


def expected(engine: Engine, batch: int, context: int, gpu: str | None) -> dict[str, Any]:
    """Return what `limit_model` expects of the engine's steps."""
    kind = {"plain": "plain", "chain": "chain"}.get(engine.kind, "tree")
    forwards = engine.budget if kind == "chain" else min(engine.budget, LEVELS)
    step = limit_model.Step(kind, batch, context, engine.budget, forwards)
    return {
        "host_ms": limit_model.HOST_MS[kind],
        "device_ms": limit_model.stages(step, gpu or ""),
    }


def line(point: dict[str, Any]) -> str:
    """Return what a person reads of a point."""
    host = point["seen"].get("host", {})
    of_host = sum(each["wall"] for each in host.get("host_ms", {}).values())
    floor = point["seen"].get("floor", {}).get("floor_ms")
    device = point["expected"]["device_ms"]
    shown = [f"{point['engine']:<34} batch {point['batch']:<3}"]
    shown += [f"step {host.get('step_ms', 0.0):6.2f} ms", f"host {of_host:6.2f}"]
    shown += [f"device {floor:6.2f}"] if floor is not None else []
    shown += [f"expected {sum(device.values()):6.2f}"] if device else []
    shown += [f"starved {host.get('starved_steps')} of {host.get('steps')}"]
    return "  ".join(shown)


def measure(options: argparse.Namespace) -> None:
    end = time.monotonic() + options.seconds
    every = engines(options.context, options.batch, options.chain, options.tree)
    points: list[dict[str, Any]] = []
    with Pool(len(every), starts(every)) as pool:
        pool.start([(engine, []) for engine in every])
        origin = provenance()
        for batch in options.batch:
            for engine in every:
                if time.monotonic() > end:
                    return
                told = expected(engine, batch, options.context, origin["gpu"])
                point = {"engine": engine.name, "batch": batch, "expected": told, "seen": {}}
                points.append(point)
                with pool.engine(engine, []) as server:
                    for how, seen in watched(engine, server, batch, options.context):
                        point["seen"] |= {how: seen}
                        notes = [*options.note, f"Expected: {limit_model.FORMULA}."]
                        found = {"provenance": origin, "notes": notes, "context": options.context}
                        with whole(options.result.resolve()) as part:
                            part.write_text(json.dumps({**found, "points": points}, indent=1))
                print(line(point), flush=True)  # noqa: T201


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve.limits", description=__doc__.partition(":")[0]
    )
    parser.add_argument("result", type=Path, help="a JSON file, written after each measurement")
    parser.add_argument("--batch", type=int, action="append", help="repeatable; 1 and 16")
    parser.add_argument("--tree", type=int, action="append", help="repeatable; 15 and 63 nodes")
    parser.add_argument("--chain", type=int, default=5, help="length; 5")
    parser.add_argument("--context", type=int, default=1000, help="tokens of a prompt; 1000")
    parser.add_argument("--seconds", type=float, default=400.0, help="no engine begins later")
    parser.add_argument("--note", action="append", default=[], help="a line; repeatable")
    options = parser.parse_args(arguments)
    options.batch, options.tree = options.batch or [1, 16], options.tree or [15, 63]
    measure(options)


if __name__ == "__main__":
    main(sys.argv[1:])
