"""The dashboards."""

from __future__ import annotations

import formulas as f
from formulas import Scope, ratio
from panels import SELECTOR, Panel, Query, bars, dashboard, heatmap, lines, number, table

from dyntree_plugin.metrics.names import CONFIG_LABELS, PREFIX

HERE = Scope(SELECTOR, "$__rate_interval", ())
BY_MODEL = HERE.per("model_name")
BY_ENGINE = BY_MODEL.per("instance", "engine")

SPEED = (
    "How much faster the target decodes with trees than alone, as estimated: the time of the "
    "stages of steps in which every request decoded, against the time that plain steps of as many "
    "requests behind as much context would take for the same tokens. These are interpolated "
    "between plain steps (target forward and greedy sampling) that were measured before the "
    "engine served, and corrected by what the target's forwards take since; no plain step counts "
    "for more than the target took in the step itself. While measurement and forwards disagree, "
    "nothing is shown. What vLLM spends around the worker's stages is left out, of both. Below 1 "
    "the tree does not pay."
)


def at_a_glance() -> list[Panel]:
    s = HERE
    return [
        number(
            "Acceptance length",
            "Tokens that a decoding request gets per step, the bonus token included. 1 is what "
            "decoding without speculation gives.",
            Query(f.acceptance_length(s)),
            lines=[(None, "red"), (1.2, "orange"), (2, "green")],
        ),
        number(
            "Speed against no speculation",
            SPEED,
            Query(f.speed(s)),
            lines=[(None, "red"), (1, "green")],
        ),
        number(
            "Tokens per step",
            "Tokens that all decoding requests get per forward of the target.",
            Query(f.tokens_per_step(s)),
        ),
        number(
            "Node efficiency",
            "Share of the verified nodes that were accepted. Trees trade it for acceptance "
            "length: it falls as the budget grows.",
            Query(f.node_efficiency(s)),
            unit="percentunit",
        ),
        number(
            "Node budget",
            "Most nodes that one request's tree may have, as of the last step.",
            Query(f"max({s.series(PREFIX + 'node_budget')})"),
        ),
        number(
            "Fallback",
            "Share of the decoding requests' steps whose tree was a chain, because sampling needs "
            "its order. Steps without a node, which an adaptive budget may choose, are shown with "
            "the reasons, in *Fallback by reason*.",
            Query(f.fallback_share(s)),
            unit="percentunit",
            lines=[(None, "green"), (0.2, "red")],
        ),
        lines(
            "Acceptance length",
            "Tokens that a decoding request gets per step, by model.",
            Query(f.acceptance_length(BY_MODEL), "{{model_name}}"),
        ),
        lines(
            "Speed against no speculation",
            SPEED,
            Query(f.speed(BY_MODEL), "{{model_name}}"),
            lines=[(None, "red"), (1, "green")],
        ),
        lines(
            "Generated tokens per second",
            "What clients get, by model.",
            Query(BY_MODEL.rate("vllm:generation_tokens_total"), "{{model_name}}"),
        ),
        lines(
            "Requests",
            "Running and waiting requests.",
            Query(f"sum({s.series('vllm:num_requests_running')})", "running"),
            Query(f"sum({s.series('vllm:num_requests_waiting')})", "waiting"),
        ),
        lines(
            "Nodes per request and step",
            "Verified and accepted nodes of a decoding request in a step, beside the budget.",
            Query(ratio(s.rate(PREFIX + "tree_nodes_sum"), f.request_steps(s)), "verified"),
            Query(ratio(f.accepted(s), f.request_steps(s)), "accepted"),
            Query(f"max({s.series(PREFIX + 'node_budget')})", "budget"),
        ),
        lines(
            "Fallback by reason",
            "Share of the decoding requests' steps without a free tree, by reason. What it is "
            "divided by has no reason, so it is summed over the same models.",
            Query(_by_reason(), "{{reason}}"),
            unit="percentunit",
            stacked=True,
        ),
    ]


def _by_reason() -> str:
    steps = f"scalar({f.request_steps(HERE)} > 0)"
    return f"{HERE.per('reason').rate(PREFIX + 'fallback_steps_total')} / {steps}"


def in_depth() -> list[Panel]:
    s, depth, stage = HERE, HERE.per("depth"), HERE.per("stage")
    nodes, accepted = PREFIX + "proposed_nodes_total", PREFIX + "accepted_nodes_total"
    steps = s.rate(f"{PREFIX}stage_seconds_count", 'stage="target"')
    seconds, grammars = f"{PREFIX}stage_seconds", f"{PREFIX}grammar_seconds"
    buckets = HERE.per("le")
    return [
        bars(
            "Requests that reach a depth",
            "Share of the request steps whose accepted path is at least so deep. Levels that "
            "hardly any path reaches cost draft forwards for nothing: lower max_depth.",
            Query(
                f"{depth.rate(accepted)} / scalar({f.request_steps(s)} > 0)",
                "{{depth}}",
            ),
            unit="percentunit",
        ),
        bars(
            "Nodes accepted by depth",
            "Share of the nodes verified at a depth that were accepted.",
            Query(ratio(depth.rate(accepted), depth.rate(nodes)), "{{depth}}"),
            unit="percentunit",
        ),
        lines(
            "Calibration",
            "Accepted tokens against those that the trees' own values expected. At 1 the values "
            "are right. Below, the draft is surer than it should be, and the budget goes to nodes "
            "that are worth less than they seem; above, trees could have been smaller.",
            Query(f.calibration(s), "all depths"),
            lines=[(None, "orange"), (0.7, "green"), (1.3, "orange")],
        ),
        bars(
            "Calibration by depth",
            "Accepted tokens against those that the trees' own values expected, by depth.",
            Query(f.calibration(depth), "{{depth}}"),
        ),
        bars(
            "Nodes by source",
            "Of each source: the share of its verified nodes that were accepted, and the share "
            "that it brought of all accepted tokens. The draft proposed the nodes alone (draft), "
            "look-up found them in the request's own text (look_up), or look-up found them and the "
            "draft judged them as well (both).",
            Query(f.acceptance_by_source(s), "{{source}}: accepted of its nodes"),
            Query(f.tokens_by_source(s), "{{source}}: of the accepted tokens"),
            unit="percentunit",
        ),
        bars(
            "Calibration by source",
            "Accepted tokens against those that the trees' own values expected, by source.",
            Query(f.calibration_by_source(s), "{{source}}"),
        ),
        lines(
            "Where step time goes",
            "Time per forward of the target, by stage: placing the nodes, the target's forward, "
            "its sampler, verification (the walk through the tree, the move of the accepted path's "
            "KV, learning), the draft's catch-up, and drafting (forwards and growth). Prefill is "
            "in target and catch_up.",
            Query(f"{stage.rate(seconds + '_sum')} / scalar({steps} > 0)", "{{stage}}"),
            unit="s",
            stacked=True,
        ),
        lines(
            "99th percentile of step time",
            "Of each stage.",
            Query(
                f"histogram_quantile(0.99, {stage.per('le').rate(seconds + '_bucket')})",
                "{{stage}}",
            ),
            unit="s",
        ),
        lines(
            "Bitmasks of grammars",
            "Time of the scheduler per step with structured output to fill a bitmask for every "
            "node. The target's forward hides it if it runs beside the scheduler.",
            Query(ratio(s.rate(grammars + "_sum"), s.rate(grammars + "_count")), "mean"),
            Query(f"histogram_quantile(0.99, {buckets.rate(grammars + '_bucket')})", "99 %"),
            unit="s",
        ),
        lines(
            "Share of drafting",
            "Share of the stages' time that goes to the draft's forwards and to growing. A tree "
            "pays while the tokens that it gains outweigh it.",
            Query(f.drafting_share(s), "catch_up and draft"),
            unit="percentunit",
        ),
        lines(
            "Draft forwards per step",
            "Forward passes of the draft per forward of the target.",
            Query(ratio(s.rate(PREFIX + "draft_forwards_total"), steps), "draft forwards"),
        ),
        heatmap(
            "Accepted path",
            "How many request steps accepted how many nodes.",
            Query(buckets.rate(PREFIX + "accepted_path_tokens_bucket"), "{{le}}", buckets=True),
        ),
        lines(
            "Tree size",
            "Nodes and depth of trees: mean, and the depth's median.",
            Query(ratio(s.rate(PREFIX + "tree_nodes_sum"), f.request_steps(s)), "nodes"),
            Query(ratio(s.rate(PREFIX + "tree_depth_sum"), f.request_steps(s)), "depth"),
            Query(
                f"histogram_quantile(0.5, {buckets.rate(PREFIX + 'tree_depth_bucket')})",
                "median depth",
            ),
        ),
        lines(
            "KV moved",
            "Tokens per second whose KV was moved to its place on the accepted path. Chains move "
            "nothing.",
            Query(s.rate(PREFIX + "kv_moved_tokens_total"), "tokens"),
        ),
        lines(
            "Nodes grown and not verified",
            "Per second, by reason: budget (others were worth more) and scheduler (the step or "
            "the context had no room for them; with traffic it means that trees are cut short: "
            "raise max_num_batched_tokens).",
            Query(HERE.per("reason").rate(PREFIX + "pruned_nodes_total"), "{{reason}}"),
        ),
    ]


def per_engine() -> list[Panel]:
    s = BY_ENGINE
    legend = "{{model_name}} {{instance}} engine {{engine}}"
    info = PREFIX + "config_info"
    return [
        table(
            "Engines",
            "Every engine of every model, now.",
            {
                "Acceptance length": f.acceptance_length(s),
                "Speed": f.speed(s),
                "Tokens per step": f.tokens_per_step(s),
                "Node efficiency": f.node_efficiency(s),
                "Calibration": f.calibration(s),
                "Fallback": f.fallback_share(s),
                "Node budget": f"max by ({', '.join(s.by)}) ({s.series(PREFIX + 'node_budget')})",
                "Tokens per second": s.rate("vllm:generation_tokens_total"),
            },
            (),
        ),
        table(
            "Options in force",
            "The plugin's version and its options, by engine.",
            {"in force": f"max by ({', '.join((*s.by, *CONFIG_LABELS))}) ({s.series(info)})"},
            ("Value", "in force"),
        ),
        lines(
            "Acceptance length",
            "Tokens that a decoding request gets per step. An engine that differs from its "
            "peers of one model serves other requests than they do.",
            Query(f.acceptance_length(s), legend),
        ),
        lines("Speed against no speculation", SPEED, Query(f.speed(s), legend)),
        lines(
            "Target forward",
            "Mean time of the target's forward.",
            Query(
                ratio(
                    s.rate(PREFIX + "stage_seconds_sum", 'stage="target"'),
                    s.rate(PREFIX + "stage_seconds_count", 'stage="target"'),
                ),
                legend,
            ),
            unit="s",
        ),
        lines(
            "Requests running",
            "How the load is spread.",
            Query(s.total(s.series("vllm:num_requests_running")), legend),
        ),
        lines(
            "Fallback",
            "Share of the decoding requests' steps whose tree was a chain, because sampling needs "
            "its order.",
            Query(f.fallback_share(s), legend),
            unit="percentunit",
        ),
        lines(
            "Calibration",
            "Accepted tokens against those that the trees' own values expected.",
            Query(f.calibration(s), legend),
        ),
    ]


DASHBOARDS = {
    "tree_at_a_glance": dashboard(
        "dyntree-glance",
        "Tree at a glance",
        "Does the token tree pay?",
        at_a_glance(),
    ),
    "tree_in_depth": dashboard(
        "dyntree-depth",
        "Tree in depth",
        "Where the tree's tokens come from, and where its time goes.",
        in_depth(),
    ),
    "per_model_and_engine": dashboard(
        "dyntree-engines",
        "Per model and engine",
        "The same figures for every model, server and engine.",
        per_engine(),
    ),
}
