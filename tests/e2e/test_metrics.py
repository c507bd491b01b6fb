"""vLLM's counters stay right with trees, and our counters agree with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

import pytest
from engine_process import Metrics, Result
from slow import marked
from workload import SLOW_ENGINES

from dyntree_plugin.metrics.names import METRICS, PREFIX

pytestmark = pytest.mark.e2e

Served = Callable[[str], Mapping[str, Result]]


def by_label(metrics: Metrics, name: str, label: str) -> dict[str, float]:
    start = f"{name}{{{label}="
    return {k.removeprefix(start)[:-1]: v for k, v in metrics.items() if k.startswith(start)}


def check_consistency(metrics: Metrics) -> None:
    """Drafted tokens are nodes, accepted tokens are the path, and a position is depth - 1."""
    counted = {
        name: metrics[f"vllm:spec_decode_num_{name}_total"]
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    trees = metrics[f"{PREFIX}tree_nodes_count"]
    without_nodes = metrics[f"{PREFIX}tree_nodes_bucket{{le=0.0}}"]
    assert counted["drafts"] == trees - without_nodes
    assert counted["draft_tokens"] == metrics[f"{PREFIX}tree_nodes_sum"]
    assert counted["accepted_tokens"] == metrics[f"{PREFIX}accepted_path_tokens_sum"]
    for name in ("tree_depth", "accepted_path_tokens"):
        assert metrics[f"{PREFIX}{name}_count"] == trees

    by_depth = by_label(metrics, f"{PREFIX}proposed_nodes_total", "depth")
    assert sum(by_depth.values()) == counted["draft_tokens"]
    accepted_at = by_label(metrics, f"{PREFIX}accepted_nodes_total", "depth")
    assert sum(accepted_at.values()) == counted["accepted_tokens"]
    estimated = by_label(metrics, f"{PREFIX}estimated_accepted_tokens_total", "depth")
    assert all(0 <= estimated[depth] <= by_depth[depth] for depth in by_depth)
    for name, depths in (
        ("proposed_nodes", by_depth),
        ("accepted_nodes", accepted_at),
        ("estimated_accepted_tokens", estimated),
    ):
        of_source = by_label(metrics, f"{PREFIX}{name}_by_source_total", "source")
        assert set(of_source) == {"draft", "look_up", "both"}
        assert sum(of_source.values()) == pytest.approx(sum(depths.values()))
    # A request without a node to verify decodes plainly, and is counted so.
    empty = metrics[f"{PREFIX}fallback_steps_total{{reason=empty_tree}}"]
    assert 0 <= empty <= without_nodes

    by_position = by_label(
        metrics, "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"
    )
    assert sum(by_position.values()) == counted["accepted_tokens"]
    shorter = by_label(metrics, f"{PREFIX}accepted_path_tokens_bucket", "le")
    for position, accepted in by_position.items():
        depth = str(int(position) + 1)
        assert accepted == accepted_at.get(depth, 0) <= by_depth.get(depth, 0)
        if (bucket := str(float(position))) in shorter:
            # A depth is reached by all paths that are not shorter.
            assert accepted == trees - shorter[bucket]


@pytest.mark.parametrize(
    ("engine", "name"),
    marked(
        [
            ("fixed", "greedy"),
            ("tree", "greedy"),
            ("tree", "mixed"),
            ("tree", "aborted"),
            ("tree", "max_model_len"),
            ("tree", "structured_output"),
            ("uncoupled", "acceptance"),
            ("tight", "sample"),
            ("tight", "demanding"),
        ],
        SLOW_ENGINES,
    ),
)
def test_the_counters_agree_with_each_other(engine: str, name: str, served: Served) -> None:
    metrics = served(engine)[name].metrics
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0
    check_consistency(metrics)


def test_kv_moves_are_counted_where_trees_branch(served: Served) -> None:
    assert served("tree")["greedy"].metrics[f"{PREFIX}kv_moved_tokens_total"] > 0


@pytest.mark.slow
def test_no_kv_move_is_counted_for_chains(served: Served) -> None:
    assert served("chain")["acceptance"].metrics[f"{PREFIX}kv_moved_tokens_total"] == 0


def test_the_stages_account_for_most_of_the_time(served: Served) -> None:
    result = served("fixed")["greedy"]
    stages = by_label(result.metrics, f"{PREFIX}stage_seconds_sum", "stage")
    assert all(seconds > 0 for seconds in stages.values())
    assert sum(stages.values()) < sum(result.seconds)
    of_steps = zip(result.stages, result.seconds, strict=True)
    # Use the median, because the process may be interrupted outside of all stages.
    assert median(sum(each.values()) / seconds for each, seconds in of_steps) > 0.5


def test_the_comparison_covers_steps_in_which_every_request_decodes_and_is_bounded(
    served: Served,
) -> None:
    counted = 0.0
    for result in served("tree").values():
        compared = by_label(result.metrics, f"{PREFIX}compared_seconds_total", "decoding")
        stages = by_label(result.metrics, f"{PREFIX}stage_seconds_sum", "stage")
        assert compared["tree"] <= sum(stages.values())
        # Neither side counts while the machine's speed changes.
        assert (compared["plain"] > 0) == (compared["tree"] > 0)
        # A tree of depth 8 gives 9 tokens at most.
        assert compared["plain"] <= 9 * compared["tree"]
        counted += compared["tree"]
    assert counted > 0


def test_at_the_end_of_the_context_plain_steps_and_cut_trees_are_counted(served: Served) -> None:
    metrics = served("fixed")["max_model_len"].metrics
    steps = metrics[f"{PREFIX}tree_nodes_count"]
    drafts = metrics["vllm:spec_decode_num_drafts_total"]
    empty = metrics[f"{PREFIX}fallback_steps_total{{reason=empty_tree}}"]
    assert empty == steps - drafts > 0
    assert metrics[f"{PREFIX}pruned_nodes_total{{reason=scheduler}}"] > 0


def test_candidates_beyond_the_budget_are_counted_as_pruned(served: Served) -> None:
    pruned = f"{PREFIX}pruned_nodes_total{{reason=budget}}"
    assert served("fixed")["greedy"].metrics[pruned] > 0


def test_an_engine_without_trees_exports_none_of_our_metrics(
    plain_result: Result, served: Served
) -> None:
    assert not [name for name in plain_result.metrics if name.startswith(PREFIX)]
    with_trees = served("tree")["greedy"].metrics
    for metric in METRICS:
        assert any(name.startswith(metric.name) for name in with_trees)


def test_offline_metrics_show_ours(served: Served) -> None:
    assert {metric.name for metric in METRICS} <= set(served("tree")["greedy"].shown)
