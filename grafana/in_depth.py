"""The dashboard that says where the tree's tokens come from, and where its time goes."""

from __future__ import annotations

import formulas as f
from colours import DOUBTFUL, GOOD
from formulas import ratio
from panels import COUNT, MEAN_COUNT, RATIO, SECONDS, SHARE, Panel, Query, bars, heatmap, lines
from scopes import HERE

from dyntree_plugin.engine.step.clock import STAGES
from dyntree_plugin.metrics.names import PREFIX, PRUNE_REASONS
from dyntree_plugin.tree.step import SOURCES

RIGHT = [(None, DOUBTFUL), (0.7, GOOD), (1.3, DOUBTFUL)]
STEPS = HERE.rate(f"{PREFIX}stage_seconds_count", 'stage="target"')


def rows() -> dict[str, list[Panel]]:
    return {
        "By depth": _by_depth(),
        "By source": _by_source(),
        "Time of a step": _time(),
        "Trees": _trees(),
    }


def _by_depth() -> list[Panel]:
    depth = HERE.per("depth")
    nodes = depth.rate(PREFIX + "proposed_nodes_total")
    accepted = depth.rate(PREFIX + "accepted_nodes_total")
    reached = f"{accepted} / scalar({f.request_steps(HERE)} > 0)"
    return [
        bars(
            "Requests that reach a depth",
            "Share of the request steps whose accepted path is at least so deep. Levels that "
            "hardly any path reaches cost draft forwards for nothing: lower max_depth.",
            SHARE,
            Query(f.per_depth(reached), "{{depth}}"),
        ),
        bars(
            "Nodes accepted by depth",
            "Share of the nodes verified at a depth that were accepted.",
            SHARE,
            Query(f.per_depth(ratio(accepted, nodes)), "{{depth}}"),
        ),
        lines(
            "Calibration",
            "Accepted tokens against those that the trees' own values expected. At 1 the values "
            "are right. Below, the draft is surer than it should be, and the budget goes to nodes "
            "that are worth less than they seem; above, trees could have been smaller.",
            RATIO,
            Query(f.calibration(HERE), "all depths"),
            lines=RIGHT,
        ),
        bars(
            "Calibration by depth",
            "Accepted tokens against those that the trees' own values expected, by depth.",
            RATIO,
            Query(f.per_depth(f.calibration(depth)), "{{depth}}"),
            lines=RIGHT,
        ),
    ]


def _by_source() -> list[Panel]:
    sources = (
        "The draft proposed the nodes alone (draft), look-up found them in the request's own text "
        "(look_up), or look-up found them and the draft judged them as well (both)."
    )
    return [
        bars(
            "Nodes accepted by source",
            f"Share of a source's verified nodes that were accepted. {sources}",
            SHARE,
            Query(f.acceptance_by_source(HERE), "{{source}}"),
            named=SOURCES,
            width=8,
        ),
        bars(
            "Accepted tokens by source",
            f"Share of all accepted tokens that a source brought. {sources}",
            SHARE,
            Query(f.tokens_by_source(HERE), "{{source}}"),
            named=SOURCES,
            width=8,
        ),
        bars(
            "Calibration by source",
            "Accepted tokens against those that the trees' own values expected, by source.",
            RATIO,
            Query(f.calibration_by_source(HERE), "{{source}}"),
            width=8,
            lines=RIGHT,
        ),
    ]


def _time() -> list[Panel]:
    stage = HERE.per("stage")
    seconds, grammars = f"{PREFIX}stage_seconds", f"{PREFIX}grammar_seconds"
    return [
        lines(
            "Where step time goes",
            "Time per forward of the target, by stage: placing the nodes, the target's forward, "
            "its sampler, verification (the walk through the tree, the move of the accepted path's "
            "KV, learning), the draft's catch-up, and drafting (forwards and growth). Prefill is "
            "in target and catch_up.",
            SECONDS,
            Query(f"{stage.rate(seconds + '_sum')} / scalar({STEPS} > 0)", "{{stage}}"),
            named=STAGES,
            stacked=True,
        ),
        lines(
            "99th percentile of step time",
            "Of each stage.",
            SECONDS,
            Query(f.quantile(stage, 0.99, seconds), "{{stage}}"),
            named=STAGES,
        ),
        lines(
            "Bitmasks of grammars",
            "Time of the scheduler per step with structured output to fill a bitmask for every "
            "node. The target's forward hides it if it runs beside the scheduler.",
            SECONDS,
            Query(ratio(HERE.rate(grammars + "_sum"), HERE.rate(grammars + "_count")), "mean"),
            Query(f.quantile(HERE, 0.99, grammars), "99 %"),
            width=8,
        ),
        lines(
            "Share of drafting",
            "Share of the stages' time that goes to the draft's forwards and to growing. A tree "
            "pays while the tokens that it gains outweigh it.",
            SHARE,
            Query(f.drafting_share(HERE), "share"),
            width=8,
        ),
        lines(
            "Draft forwards per step",
            "Forward passes of the draft per forward of the target.",
            MEAN_COUNT,
            Query(ratio(HERE.rate(PREFIX + "draft_forwards_total"), STEPS), "draft forwards"),
            width=8,
        ),
    ]


def _trees() -> list[Panel]:
    path = HERE.per("le").rate(PREFIX + "accepted_path_tokens_bucket")
    depths = ratio(HERE.rate(PREFIX + "tree_depth_sum"), f.request_steps(HERE))
    return [
        heatmap(
            "Accepted path",
            "How many request steps accepted how many nodes.",
            MEAN_COUNT,
            Query(path, "{{le}}", buckets=True),
        ),
        lines(
            "Tree size",
            "Nodes and depth of trees: mean, and the depth's median.",
            MEAN_COUNT,
            Query(ratio(f.verified(HERE), f.request_steps(HERE)), "nodes"),
            Query(depths, "depth"),
            Query(f.quantile(HERE, 0.5, PREFIX + "tree_depth"), "median depth"),
        ),
        lines(
            "KV moved",
            "Tokens per second whose KV was moved to its place on the accepted path. Chains move "
            "nothing.",
            COUNT,
            Query(HERE.rate(PREFIX + "kv_moved_tokens_total"), "tokens"),
        ),
        lines(
            "Nodes grown and not verified",
            "Per second, by reason: budget (others were worth more) and scheduler (the step or "
            "the context had no room for them; with traffic it means that trees are cut short: "
            "raise max_num_batched_tokens).",
            COUNT,
            Query(HERE.per("reason").rate(PREFIX + "pruned_nodes_total"), "{{reason}}"),
            named=PRUNE_REASONS,
        ),
        lines(
            "Weight updates",
            "Updates per second of the weights of target and draft. The further the target moves "
            "from what its draft was trained for, the fewer nodes it accepts.",
            COUNT,
            Query(HERE.per("model").rate(PREFIX + "weight_updates_total"), "{{model}}"),
        ),
    ]
