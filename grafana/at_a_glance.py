"""The dashboard that says whether the tree pays."""

from __future__ import annotations

import formulas as f
from colours import BAD, DOUBTFUL, GOOD
from formulas import ratio
from panels import COUNT, MEAN_COUNT, RATIO, SECONDS, SHARE, Panel, Query, lines, number
from scopes import BY_MODEL, HERE, SPEED

from dyntree_plugin.metrics.names import FALLBACK_REASONS, PREFIX

PAYS = [(None, BAD), (1, GOOD)]
BUDGET = f"max({HERE.series(PREFIX + 'node_budget')})"
PER_OUTPUT = "vllm:inter_token_latency_seconds"
PER_TOKEN = "vllm:request_time_per_output_token_seconds"


def rows() -> dict[str, list[Panel]]:
    return {
        "Does the tree pay?": _numbers(),
        "Acceptance and latency": _acceptance_and_latency(),
        "Trees": _trees(),
        "Load": _load(),
    }


def _numbers() -> list[Panel]:
    s = HERE
    return [
        number(
            "Acceptance length",
            "Tokens that a decoding request gets per step, the bonus token included. 1 is what "
            "decoding without speculation gives.",
            RATIO,
            Query(f.acceptance_length(s)),
            lines=[(None, BAD), (1.2, DOUBTFUL), (2, GOOD)],
        ),
        number("Speed against no speculation", SPEED, RATIO, Query(f.speed(s)), lines=PAYS),
        number(
            "Tokens per step",
            "Tokens that all decoding requests get per forward of the target.",
            MEAN_COUNT,
            Query(f.tokens_per_step(s)),
        ),
        number(
            "Node efficiency",
            "Share of the verified nodes that were accepted. Trees trade it for acceptance "
            "length: it falls as the budget grows.",
            SHARE,
            Query(f.node_efficiency(s)),
        ),
        number(
            "Node budget",
            "Most nodes that one request's tree may have, as of the last step.",
            COUNT,
            Query(BUDGET),
        ),
        number(
            "Fallback",
            "Share of the decoding requests' steps whose tree was a chain, because sampling needs "
            "its order. Steps without a node, which an adaptive budget may choose, are shown with "
            "the reasons, in *Steps with a chain or no tree*.",
            SHARE,
            Query(f.fallback_share(s)),
            lines=[(None, GOOD), (0.2, BAD)],
        ),
    ]


def _acceptance_and_latency() -> list[Panel]:
    return [
        lines(
            "Acceptance length by model",
            "Tokens that a decoding request gets per step, by model.",
            RATIO,
            Query(f.acceptance_length(BY_MODEL), "{{model_name}}"),
        ),
        lines(
            "Speed against no speculation by model",
            SPEED,
            RATIO,
            Query(f.speed(BY_MODEL), "{{model_name}}"),
            lines=PAYS,
        ),
        lines(
            "Inter-token latency",
            "vLLM's histogram of the time between two outputs of a request. With trees, an output "
            "is a step and brings several tokens: as many as the acceptance length says. So it "
            "rises as trees grow, even where each token comes sooner.",
            SECONDS,
            *_quantiles(PER_OUTPUT),
        ),
        lines(
            "Time per output token",
            "vLLM's histogram of each ended request's mean time per token after the first. Unlike "
            "the inter-token latency, it counts every token of a step, so trees that pay lower it.",
            SECONDS,
            *_quantiles(PER_TOKEN),
        ),
    ]


def _quantiles(histogram: str) -> list[Query]:
    return [
        Query(f.quantile(HERE, 0.5, histogram), "median"),
        Query(f.quantile(HERE, 0.99, histogram), "99 %"),
    ]


def _trees() -> list[Panel]:
    s = HERE
    rejected = f"({f.verified(s)} - {f.accepted(s)})"
    alone = {"matcher": {"id": "byName", "options": "budget"}}
    alone["properties"] = [{"id": "custom.stacking", "value": {"mode": "none", "group": "A"}}]
    return [
        lines(
            "Nodes per request and step",
            "Nodes that were verified for a decoding request in a step: accepted and rejected "
            "ones, on top of each other, beside the budget.",
            MEAN_COUNT,
            Query(ratio(f.accepted(s), f.request_steps(s)), "accepted"),
            Query(ratio(rejected, f.request_steps(s)), "rejected"),
            Query(BUDGET, "budget"),
            stacked=True,
            overrides=[alone],
        ),
        lines(
            "Steps with a chain or no tree",
            "Share of the decoding requests' steps with a chain or no tree, by reason: a chain, "
            "because sampling needs its order (logits_processors), or no node at all "
            "(empty_tree). An adaptive budget verifies no node where none pays, which is no fault.",
            SHARE,
            Query(f.fallback_by_reason(s), "{{reason}}"),
            named=FALLBACK_REASONS,
            stacked=True,
        ),
    ]


def _load() -> list[Panel]:
    s = HERE
    usage = f"max by (model_name) ({s.gauge('vllm:kv_cache_usage_perc')})"
    return [
        lines(
            "Generated tokens per second",
            "What clients get, by model.",
            COUNT,
            Query(BY_MODEL.rate("vllm:generation_tokens_total"), "{{model_name}}"),
            width=8,
        ),
        lines(
            "Requests",
            "Running and waiting requests. With more at once the rows of trees cost more, and an "
            "adaptive budget verifies fewer.",
            COUNT,
            Query(f"sum({s.gauge('vllm:num_requests_running')})", "running"),
            Query(f"sum({s.gauge('vllm:num_requests_waiting')})", "waiting"),
            width=8,
        ),
        lines(
            "KV cache usage",
            "Share of the blocks of the KV cache that are in use, by model: that of its fullest "
            "engine. The nodes of a tree take slots until the step is verified.",
            SHARE,
            Query(usage, "{{model_name}}"),
            width=8,
            lines=[(None, GOOD), (0.9, DOUBTFUL)],
        ),
    ]
