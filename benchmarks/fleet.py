"""A paper estimate of a fleet with and without trees: python -m benchmarks.fleet

Tokens per second come from the roofline model and from the acceptance that the laboratory measured.
No figure of it was measured on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import laboratory, roofline
from benchmarks.laboratory import CHAIN, PLAIN, TREE, Drafted
from benchmarks.roofline import H200, Gpu, Shape, computing_seconds, forward_seconds
from dyntree_plugin.commands.vocabulary import shared
from dyntree_plugin.provenance import provenance

SECONDS_PER_DAY = 86400
TEMPERATURES = (0.0, 1.0)
BATCHES = (1, 4, 16, 64, 128, 256)
LEVELS = (150.0, 100.0, 60.0, 30.0)
"""Tokens per second that every request gets at least."""
SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the tokens that the laboratory's draft had accepted."""


@dataclass(frozen=True)
class Replica:
    """A target with its draft on one or several GPUs. One server of vLLM runs it."""

    name: str
    target: Shape
    draft: Shape
    gpu: Gpu
    gpus: int

    def most_requests(self, load: Load) -> int:
        """Requests whose KV fits beside the weights, of the target and of the draft."""
        usable = load.memory_share * self.gpus * self.gpu.memory
        free = usable - self.target.weight_bytes - self.draft.weight_bytes
        per_request = load.context * (self.target.kv_bytes + self.draft.kv_bytes)
        return min(load.most_requests, int(free / per_request))

    def step_seconds(self, requests: int, step: Drafted, load: Load) -> float:
        """Seconds of a decode step of all requests, its drafting included.

        The first draft forward reads the tokens of the last step.
        """
        cached = requests * load.context
        seconds = load.host_seconds + self._forward(
            self.target, requests * (1 + step.nodes), cached
        )
        if step.forwards:
            rows = requests * step.expanded / step.forwards
            seconds += self._forward(self.draft, requests * step.tokens, cached)
            seconds += (step.forwards - 1) * self._forward(self.draft, rows, cached)
        return seconds

    def prompt_seconds(self, step: Drafted) -> float:
        """Seconds of one token of a prompt, which the draft reads as well."""
        models = (self.target, self.draft) if step.forwards else (self.target,)
        return sum(computing_seconds(shape, self.gpu, 1, self.gpus) for shape in models)

    def _forward(self, shape: Shape, rows: float, cached: float) -> float:
        return forward_seconds(shape, self.gpu, rows, cached, self.gpus)


@dataclass(frozen=True)
class Load:
    """What the users ask for, and what is assumed of the machines."""

    users: float = 100e6
    tokens_per_user: float = 5000
    prompt_per_token: float = 2.0
    peak_over_mean: float = 2.0
    utilisation: float = 0.7
    dollars_per_gpu_hour: float = 3.0
    context: float = 2000
    memory_share: float = 0.9
    most_requests: int = 256
    host_seconds: float = 1e-3


REPLICAS = (
    Replica("8B", roofline.LLAMA_8B, roofline.LLAMA_1B, H200, 1),
    Replica("70B", roofline.LLAMA_70B, roofline.LLAMA_1B, H200, 2),
)
LOAD = Load()


@dataclass(frozen=True)
class Point:
    """How a replica works: requests at a time, the step, and what comes of both."""

    requests: int
    step: Drafted
    per_request: float
    """Tokens per second of one request while nothing but decoding runs."""
    tokens_per_second: float
    """Of the replica, with the time for prompts taken off."""


def point(replica: Replica, requests: int, step: Drafted, load: Load) -> Point:
    """Return what a replica makes of so many requests with such steps."""
    per_request = step.tokens / replica.step_seconds(requests, step, load)
    decoding = 1 / (requests * per_request)
    prompts = load.prompt_per_token * replica.prompt_seconds(step)
    return Point(requests, step, per_request, 1 / (decoding + prompts))


def best(replica: Replica, requests: int, steps: Sequence[Drafted], load: Load) -> Point:
    """Return the step of most tokens per second, as the adaptive budget chooses it."""
    return max(
        (point(replica, requests, step, load) for step in steps),
        key=lambda each: each.tokens_per_second,
    )


def at_level(replica: Replica, level: float, steps: Sequence[Drafted], load: Load) -> Point | None:
    """Return the point of most tokens per second at which every request gets ``level`` of them;
    None if none does, however few requests there are."""
    points = (
        point(replica, requests, step, load)
        for requests in range(1, replica.most_requests(load) + 1)
        for step in steps
    )
    enough = (each for each in points if each.per_request >= level)
    return max(enough, key=lambda each: each.tokens_per_second, default=None)


def gpus_at_peak(replica: Replica, at: Point, load: Load) -> float:
    """GPUs that the fleet needs in its busiest hour."""
    asked = load.users * load.tokens_per_user / SECONDS_PER_DAY * load.peak_over_mean
    return replica.gpus * asked / (load.utilisation * at.tokens_per_second)


def dollars_per_million(replica: Replica, at: Point, load: Load) -> float:
    """Of output tokens, if the number of replicas follows the load."""
    hours = replica.gpus * 1e6 / (load.utilisation * at.tokens_per_second) / 3600
    return hours * load.dollars_per_gpu_hour


def choices(temperature: float, share: float = 1.0) -> dict[str, list[Drafted]]:
    """Return the steps to choose from: none, chains and none, trees and none."""
    drafted = {
        name: [step.scaled(share) for step in laboratory.measured(method, temperature)]
        for name, method in (("chains", CHAIN), ("trees", TREE))
    }
    return {"none": [PLAIN], **{name: [PLAIN, *steps] for name, steps in drafted.items()}}


def by_batch(load: Load = LOAD) -> list[dict[str, Any]]:
    """Return the best step of every replica, temperature and number of requests."""
    return [
        {
            "replica": replica.name,
            "temperature": temperature,
            "requests": requests,
            **{
                name: _told(best(replica, requests, steps, load))
                for name, steps in choices(temperature).items()
            },
        }
        for replica in REPLICAS
        for temperature in TEMPERATURES
        for requests in BATCHES
        if requests <= replica.most_requests(load)
    ]


def by_level(load: Load = LOAD, share: float = 1.0) -> list[dict[str, Any]]:
    """Return the fleet for every replica, temperature and speed that each request gets."""
    rows = []
    for replica in REPLICAS:
        for temperature in TEMPERATURES:
            for level in LEVELS:
                row: dict[str, Any] = {
                    "replica": replica.name,
                    "temperature": temperature,
                    "level": level,
                    "share": share,
                }
                for name, steps in choices(temperature, share).items():
                    at = at_level(replica, level, steps, load)
                    row[name] = None if at is None else _fleet(replica, at, load)
                rows.append(row)
    return rows


def _told(at: Point) -> dict[str, Any]:
    return {
        "requests": at.requests,
        "nodes": round(at.step.nodes),
        "tokens_per_step": at.step.tokens,
        "per_request": at.per_request,
        "tokens_per_second": at.tokens_per_second,
    }


def _fleet(replica: Replica, at: Point, load: Load) -> dict[str, Any]:
    return _told(at) | {
        "gpus": gpus_at_peak(replica, at, load),
        "dollars_per_million": dollars_per_million(replica, at, load),
    }


def assumptions_table() -> str:
    """Return what is assumed as a table for a page."""
    sizes = "; ".join(
        f"{r.name}: {r.target.name} with {r.draft.name}, {r.gpus} {r.gpu.name}" for r in REPLICAS
    )
    peak = LOAD.users * LOAD.tokens_per_user / SECONDS_PER_DAY * LOAD.peak_over_mean
    told = {
        "replicas, all in bfloat16": sizes,
        "users of a day": f"{LOAD.users / 1e6:g} million",
        "output tokens of a user and day": f"{LOAD.tokens_per_user:,g}",
        "prompt tokens for each output token, without those of the prefix cache": (
            f"{LOAD.prompt_per_token:g}"
        ),
        "busiest hour over the mean": f"{LOAD.peak_over_mean:g}",
        "output tokens per second in the busiest hour, from these": f"{peak / 1e6:.1f} million",
        "tokens of a request in the KV cache": f"{LOAD.context:,g}",
        "load that a replica is given, of what it can take": f"{LOAD.utilisation:.0%}",
        "memory of a GPU for weights and KV": f"{LOAD.memory_share:.0%}",
        "most requests of a replica": f"{LOAD.most_requests}",
        "time of the host in a step": f"{1000 * LOAD.host_seconds:g} ms",
        "price of a GPU and hour": f"${LOAD.dollars_per_gpu_hour:g}",
        "data sheet's bandwidth that is reached": f"{roofline.REACHED_BANDWIDTH:.0%}",
        "data sheet's operations that are reached": f"{roofline.REACHED_OPERATIONS:.0%}",
        "least time of a layer": f"{1e6 * roofline.LAUNCH_SECONDS:g} µs",
        "all-reduces of a layer, with two GPUs": (
            f"{roofline.ALL_REDUCES} of {1e6 * roofline.ALL_REDUCE_SECONDS:g} µs and their bytes"
        ),
    }
    lines = [f"| {name} | {value} |" for name, value in told.items()]
    return "\n".join(["| assumed | value |", "|---|---|", *lines])


def batch_table() -> str:
    """Return tokens per second by the requests that decode at a time, as a table for a page."""
    lines = [
        "| replica | temperature | requests | tokens/s without | nodes of the best tree | "
        "tokens/s with trees | × without | × best chain |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in by_batch():
        none, chains, trees = (row[name]["tokens_per_second"] for name in ("none", *_SPECULATIVE))
        lines.append(
            f"| {row['replica']} | {row['temperature']:g} | {row['requests']} | {none:,.0f} | "
            f"{row['trees']['nodes'] or 'no tree'} | {trees:,.0f} | {trees / none:.2f} | "
            f"{trees / chains:.2f} |"
        )
    return "\n".join(lines)


_SPECULATIVE = ("chains", "trees")


def fleet_table() -> str:
    """Return GPUs and dollars by the speed that every request gets, as a table for a page."""
    lines = [
        "| replica | temperature | tokens/s of a request | GPUs without | with chains | "
        "with trees | requests per replica, without → with trees | $ per million without | "
        "with trees |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in by_level():
        none, chains, trees = (row[name] for name in ("none", *_SPECULATIVE))
        requests = " → ".join("–" if at is None else f"{at['requests']}" for at in (none, trees))
        lines.append(
            f"| {row['replica']} | {row['temperature']:g} | {row['level']:g} | "
            f"{_number(none, 'gpus', ',.0f')} | {_number(chains, 'gpus', ',.0f')} | "
            f"{_number(trees, 'gpus', ',.0f')} | {requests} | "
            f"{_number(none, 'dollars_per_million', '.2f')} | "
            f"{_number(trees, 'dollars_per_million', '.2f')} |"
        )
    return "\n".join(lines)


def _number(at: dict[str, Any] | None, key: str, form: str) -> str:
    return "not reached" if at is None else format(at[key], form)


def sensitivity_table() -> str:
    """Return the GPUs with trees over those without, by how much of the draft is accepted."""
    lines = [
        "| replica | temperature | tokens/s of a request | "
        + " | ".join(f"{share:.0%}" for share in SHARES)
        + " |",
        "|---|---:|---:|" + "---:|" * len(SHARES),
    ]
    for rows in zip(*(by_level(share=share) for share in SHARES), strict=True):
        first = rows[0]
        if first["none"] is None:
            continue
        saved = " | ".join(f"{row['trees']['gpus'] / row['none']['gpus']:.2f}" for row in rows)
        lines.append(
            f"| {first['replica']} | {first['temperature']:g} | {first['level']:g} | {saved} |"
        )
    return "\n".join(lines)


def main(
    output: Annotated[Path | None, shared("--output", "A JSON file.")] = None,
) -> None:
    """Estimate what a fleet makes with and without trees."""
    print("\n\n".join((assumptions_table(), batch_table(), fleet_table(), sensitivity_table())))  # noqa: T201
    if output is not None:
        result = {
            "kind": "model",
            "load": asdict(LOAD),
            "replicas": [asdict(replica) for replica in REPLICAS],
            "by_requests": by_batch(),
            "by_level": [row for share in SHARES for row in by_level(share=share)],
            "provenance": provenance(),
        }
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
