"""The metrics page shows the steps that were counted."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from counting import ACCEPTED, SHAPE, Step, page_of_two_engines
from prometheus_client import REGISTRY

from dyntree_plugin.engine.patches import carry_tree_stats
from dyntree_plugin.engine.telemetry.prometheus import TreeSpecDecodingProm
from dyntree_plugin.metrics.names import PREFIX


@pytest.fixture
def page() -> Iterator[TreeSpecDecodingProm]:
    with page_of_two_engines() as page:
        yield page


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(PREFIX + name, {"model_name": "m", "engine": "0", **labels})


def test_every_series_is_there_before_anything_happens(page: TreeSpecDecodingProm) -> None:
    assert value("fallback_steps_total", reason="empty_tree") == 0
    assert value("pruned_nodes_total", reason="scheduler") == 0
    assert value("proposed_nodes_total", depth="8") == 0
    assert value("accepted_nodes_by_source_total", source="both") == 0
    assert value("stage_seconds_count", stage="draft") == 0
    assert value("node_budget") == SHAPE.node_budget


def test_a_step_adds_what_it_counted_to_its_own_engine(page: TreeSpecDecodingProm) -> None:
    carry_tree_stats()
    step = Step(2)
    stats = step.add_up(step.count())
    page.observe(stats, 0)
    stats.stage_seconds["target"] = [0.002, 0.003]  # the device had not finished the step before
    page.observe(stats, 0)
    page.observe(stats, 1)
    assert value("tree_nodes_count") == 4
    assert value("tree_nodes_sum") == 4 * SHAPE.node_budget
    assert value("accepted_path_tokens_sum") == 4 * ACCEPTED
    assert value("accepted_nodes_total", depth="3") == 4
    assert value("accepted_nodes_total", depth="4") == 0
    assert value("proposed_nodes_by_source_total", source="draft") == 4 * (SHAPE.node_budget - 1)
    assert value("proposed_nodes_by_source_total", source="look_up") == 4
    assert value("accepted_nodes_by_source_total", source="draft") == 4 * (ACCEPTED - 1)
    assert value("accepted_nodes_by_source_total", source="look_up") == 4
    estimated = value("estimated_accepted_tokens_by_source_total", source="look_up")
    assert estimated == pytest.approx(4 * math.exp(-1))
    assert value("stage_seconds_sum", stage="target") == pytest.approx(0.007)
    assert value("stage_seconds_count", stage="target") == 3
    assert value("compared_seconds_total", decoding="tree") == pytest.approx(0.024)
    assert value("budget_seconds_total", time="expected") == pytest.approx(0.012)
    assert value("budget_seconds_total", time="measured") == pytest.approx(0.024)
    assert value("budget_seconds_total", time="trying") == pytest.approx(0.0002)
    assert value("tree_nodes_count", engine="1") == 2
