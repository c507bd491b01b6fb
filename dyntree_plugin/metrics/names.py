"""The one table of the metrics that the plugin adds to vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "vllm:dyntree_"
"""vLLM's `LLM.get_metrics()` shows only names that start with ``vllm:``."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Labels come after ``model_name`` and ``engine``, which all of them have.

    ``source``: the field of TreeSpecDecodingStats that feeds it. The name that Prometheus shows
    for a counter ends in ``_total``.
    """

    name: str
    kind: Literal["counter", "histogram"]
    source: str
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[int, ...] = ()

    @property
    def exposed_name(self) -> str:
        return self.name + ("_total" if self.kind == "counter" else "")


_DEPTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64)

METRICS = (
    Metric(
        PREFIX + "tree_nodes",
        "histogram",
        "tree_nodes",
        "Nodes of a verified tree, the root not counted.",
        buckets=(0, 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024),
    ),
    Metric(
        PREFIX + "tree_depth",
        "histogram",
        "tree_depths",
        "Depth of the deepest node of a verified tree.",
        buckets=_DEPTHS,
    ),
    Metric(
        PREFIX + "accepted_path_tokens",
        "histogram",
        "accepted_paths",
        "Accepted tokens of a verified tree, the bonus token not counted.",
        buckets=_DEPTHS,
    ),
    Metric(
        PREFIX + "proposed_nodes",
        "counter",
        "nodes_by_depth",
        "Nodes verified at a depth.",
        labels=("depth",),
    ),
    Metric(
        PREFIX + "fallback_steps",
        "counter",
        "fallbacks",
        "Steps in which a request was not given a free tree, by reason: its sampling needs chain "
        "order (the tree is a chain), or there was no node to verify.",
        labels=("reason",),
    ),
    Metric(
        PREFIX + "kv_moved_tokens",
        "counter",
        "kv_moved",
        "Tokens whose KV was moved to its place on the accepted path.",
    ),
    Metric(
        PREFIX + "draft_forwards",
        "counter",
        "draft_forwards",
        "Forward passes of the draft model.",
    ),
    Metric(
        PREFIX + "stage_seconds",
        "counter",
        "stage_seconds",
        "Time of the worker by stage: target, sample, walk, move, draft, grow.",
        labels=("stage",),
    ),
)


def markdown_table() -> str:
    """The metrics as a Markdown table, for the README."""
    rows = [
        f"| `{m.exposed_name}` | {m.kind} | {', '.join(m.labels)} | {m.meaning} |" for m in METRICS
    ]
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows])
