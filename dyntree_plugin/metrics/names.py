"""The table of the metrics that the plugin adds to vLLM's."""

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
    "exactness",
    "budget",
)
"""The plugin's version, and the options."""


EMPTY_TREE = "empty_tree"
"""A request had no node to verify, such as at the end of its context, or with a limit of 0."""

BUDGET, SCHEDULER = "budget", "scheduler"
"""Why a grown node is not verified: it does not pay, or vLLM's scheduler had no room for it in the
step or in the context."""

TREE, PLAIN = "tree", "plain"
"""The two parts of the estimated speed: steps with trees, and plain steps for the same tokens."""

TARGET, DRAFT = "target", "draft"
"""The models whose weights vLLM can replace while it serves."""

LOGITS_PROCESSORS = "logits_processors"
"""The tree had to be a chain."""

FALLBACK_REASONS = (LOGITS_PROCESSORS, EMPTY_TREE)
PRUNE_REASONS = (BUDGET, SCHEDULER)


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. ``labels`` come after ``model_name`` and ``engine``, which all metrics have.

    ``source``: the field of TreeSpecDecodingStats with its values; None if it never changes.
    Prometheus adds ``_total`` to the name of a counter.
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
        "Nodes verified for one decoding request in one step, without the root; 0 without a tree.",
        buckets=(0, 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024),
    ),
    Metric(
        PREFIX + "tree_depth",
        "histogram",
        "tree_depths",
        "Depth of the deepest node verified for one decoding request in one step.",
        buckets=_DEPTHS,
    ),
    Metric(
        PREFIX + "accepted_path_tokens",
        "histogram",
        "accepted_paths",
        "Accepted nodes for one decoding request in one step: the tokens that it got, less one.",
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
        "Expected number of accepted nodes at a depth: the sum of the verified nodes' estimated "
        "chances of being accepted.",
        labels=("depth",),
    ),
    Metric(
        PREFIX + "proposed_nodes_by_source",
        "counter",
        "nodes_by_source",
        "Nodes verified, by source: proposed by the draft (draft), by look-up in the request's "
        "text (look_up), or by look-up and scored by the draft (both).",
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
        "Expected number of accepted nodes, by source.",
        labels=("source",),
    ),
    Metric(
        PREFIX + "pruned_nodes",
        "counter",
        "pruned",
        "Nodes that were grown for a decoding request and not verified, by reason. budget: "
        "verifying them was not expected to pay. scheduler: the step, the context or the request's "
        "limit had no room, or the request takes only one more token.",
        labels=("reason",),
    ),
    Metric(
        PREFIX + "fallback_steps",
        "counter",
        "fallbacks",
        "Steps in which a decoding request got a chain or no tree, by reason. logits_processors: "
        "a custom logits processor would take too much memory with a tree. empty_tree: the request "
        "takes only one more token, or no node pays.",
        labels=("reason",),
    ),
    Metric(
        PREFIX + "kv_moved_tokens",
        "counter",
        "kv_moved",
        "Accepted tokens whose KV was moved.",
    ),
    Metric(
        PREFIX + "draft_forwards",
        "counter",
        "draft_forwards",
        "Draft forwards, the catch-up included. A forward of a pool counts once.",
    ),
    Metric(
        PREFIX + "stage_seconds",
        "histogram",
        "stage_seconds",
        "Time of the worker per step, by stage: place, target, sample, verify (walk, move of KV, "
        "learning), catch_up, draft (forwards and growth).",
        labels=("stage",),
        buckets=_SECONDS,
    ),
    Metric(
        PREFIX + "grammar_seconds",
        "histogram",
        "grammar_seconds",
        "Time of the scheduler to fill the bitmasks of a step with structured output. If the "
        "target's forward runs meanwhile, this time is hidden.",
        buckets=_SECONDS,
    ),
    Metric(
        PREFIX + "weight_updates",
        "counter",
        "replaced",
        "Times that a model's weights were replaced, counted with the next step: by "
        "reload_weights, a finished weight update, or waking up from sleep of level 2.",
        labels=("model",),
    ),
    Metric(
        PREFIX + "compared_seconds",
        "counter",
        "compared",
        "Time of steps in which every request decoded (tree), and the time that the target is "
        "estimated to take for the same tokens without trees (plain). The estimate is measured at "
        "start-up and corrected while serving. Nothing is counted while it is too uncertain, such "
        "as in the first 20 steps.",
        labels=("decoding",),
    ),
    Metric(
        PREFIX + "budget_seconds",
        "counter",
        "budgeted",
        "Time of steps in which every request decoded, as the adaptive budget expected it "
        "(expected) and as it was (measured), and how much of it more rows or forwards than seem "
        "best were expected to cost (trying): at first the time of two steps, then 1 % of each at "
        "most. If expected and measured time differ for long, the budget chooses by wrong costs.",
        labels=("time",),
    ),
    Metric(
        PREFIX + "node_budget",
        "gauge",
        "node_budget",
        "Most nodes of one request's tree in the last step; with a fixed budget, node_budget.",
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
