"""The one table of the metrics that the plugin adds to vLLM's own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from dyntree_plugin.tree.shape import TreeShape

PREFIX = "vllm:dyntree_"
"""vLLM's `LLM.get_metrics()` shows only names that start with ``vllm:``."""

CONFIG_LABELS = (
    *("version", "growth", "sampling", "rule"),
    *(field.name for field in dataclasses.fields(TreeShape) if field.name != "grafts"),
    "lookup",
    "calibration",
    "block_chains",
    "budget",
)
"""Labels of the configuration: the plugin's version, and the options in force."""


EMPTY_TREE = "empty_tree"
"""Reason of a step in which a request had no node to verify, such as at the end of its context, or
since its own limit is 0."""

BUDGET, SCHEDULER = "budget", "scheduler"
"""Why nodes that were grown are not verified: others are worth more, or vLLM's scheduler had no
room for them in the step or in the context."""

TREE, PLAIN = "tree", "plain"
"""The two sides of the estimated speed: the step as it was, and plain steps of the target alone."""

LOGITS_PROCESSORS = "logits_processors"
"""Reason of a step whose tree had to be a chain."""

FALLBACK_REASONS = (LOGITS_PROCESSORS, EMPTY_TREE)
PRUNE_REASONS = (BUDGET, SCHEDULER)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Labels come after ``model_name`` and ``engine``, which all of them have.

    ``source`` is the field of TreeSpecDecodingStats that feeds it; without one the metric never
    changes. Prometheus adds ``_total`` to the name of a counter.
    """

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    source: str | None
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed_name(self) -> str:
        return self.name + ("_total" if self.kind == "counter" else "")

    @property
    def series(self) -> tuple[str, ...]:
        """The names that can be queried."""
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.exposed_name,)


_DEPTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64)
_SECONDS = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
)

METRICS = (
    Metric(
        PREFIX + "tree_nodes",
        "histogram",
        "tree_nodes",
        "Nodes verified for one decoding request in one step, without the root; 0 if it decoded "
        "without a tree. The histogram counts each request in each step once.",
        buckets=(0, 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024),
    ),
    Metric(
        PREFIX + "tree_depth",
        "histogram",
        "tree_depths",
        "Depth of the deepest verified node, for each decoding request in each step.",
        buckets=_DEPTHS,
    ),
    Metric(
        PREFIX + "accepted_path_tokens",
        "histogram",
        "accepted_paths",
        "Accepted nodes for each decoding request in each step: the tokens that the request got, "
        "less one.",
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
        PREFIX + "accepted_nodes",
        "counter",
        "accepted_by_depth",
        "Nodes at a depth that were accepted and delivered.",
        labels=("depth",),
    ),
    Metric(
        PREFIX + "estimated_accepted_tokens",
        "counter",
        "estimated_by_depth",
        "Expected number of accepted nodes at a depth: the sum, over the verified nodes, of the "
        "estimated chance that the node is accepted.",
        labels=("depth",),
    ),
    Metric(
        PREFIX + "proposed_nodes_by_source",
        "counter",
        "nodes_by_source",
        "Nodes verified, by source: proposed by the draft alone (draft), found by look-up in the "
        "request's own text (look_up), or found there and judged by the draft as well (both).",
        labels=("source",),
    ),
    Metric(
        PREFIX + "accepted_nodes_by_source",
        "counter",
        "accepted_by_source",
        "Nodes that were accepted and delivered, by source.",
        labels=("source",),
    ),
    Metric(
        PREFIX + "estimated_accepted_tokens_by_source",
        "counter",
        "estimated_by_source",
        "Expected number of accepted nodes of a source: the sum, over the verified nodes, of the "
        "estimated chance that the node is accepted.",
        labels=("source",),
    ),
    Metric(
        PREFIX + "pruned_nodes",
        "counter",
        "pruned",
        "Nodes that were grown for a decoding request and not verified, by reason. budget: to "
        "verify them was expected to cost more than it brings. scheduler: the step, the context or "
        "the request's own limit had no room, or the request takes one more token alone.",
        labels=("reason",),
    ),
    Metric(
        PREFIX + "fallback_steps",
        "counter",
        "fallbacks",
        "Steps in which a decoding request got a chain or no tree, by reason. logits_processors: "
        "with a tree, a custom logits processor would take too much memory. empty_tree: there was "
        "no node to verify: a request takes one more token alone, or an adaptive budget finds that "
        "no node pays.",
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
        "Forward passes of the draft, the catch-up included. A forward of a pool counts once.",
    ),
    Metric(
        PREFIX + "stage_seconds",
        "histogram",
        "stage_seconds",
        "Time of the worker per step by stage. The stages are the same on every device: place, "
        "target, sample, verify (walk, move of KV, learning), catch_up, draft (forwards and "
        "growth).",
        labels=("stage",),
        buckets=_SECONDS,
    ),
    Metric(
        PREFIX + "grammar_seconds",
        "histogram",
        "grammar_seconds",
        "Time of the scheduler to fill the bitmasks of a step with structured output, one for "
        "every node. Where the target's forward runs beside the scheduler, it hides this time.",
        buckets=_SECONDS,
    ),
    Metric(
        PREFIX + "compared_seconds",
        "counter",
        "compared",
        "Time of the stages of steps in which every request decoded (tree), and the time that the "
        "target alone is estimated to take for the same tokens (plain). The estimate comes from "
        "plain steps, measured before the engine serves; the forwards of later steps correct it. "
        "Nothing is counted in the first 20 steps, or while forwards differ by more than about "
        "15 % from what the corrected measurement predicts.",
        labels=("decoding",),
    ),
    Metric(
        PREFIX + "node_budget",
        "gauge",
        "node_budget",
        "Most nodes of one request's tree in the last step; with a fixed budget, the option's.",
    ),
    Metric(
        PREFIX + "config_info",
        "gauge",
        None,
        "1, with the plugin's version and the main options in force as labels.",
        labels=CONFIG_LABELS,
    ),
)


def markdown_table() -> str:
    """Return the metrics as a Markdown table, for docs/metrics.md."""
    rows = [
        f"| `{m.exposed_name}` | {m.kind} | {', '.join(m.labels)} | {m.meaning} |" for m in METRICS
    ]
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows])
