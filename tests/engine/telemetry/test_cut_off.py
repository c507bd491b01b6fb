"""Tokens that a front end cuts off at a stop string are taken back from the counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_stats import Counting, worker_counts

from dyntree_plugin.engine.telemetry.cut_off import CutOff
from dyntree_plugin.engine.telemetry.stats import TreeSpecDecodingStats


def ended(name: str, counted: int, returned: int) -> Any:
    return SimpleNamespace(
        request_id=name,
        stats=SimpleNamespace(num_generation_tokens=counted),
        detokenizer=SimpleNamespace(num_output_tokens=lambda: returned),
    )


def step() -> TreeSpecDecodingStats:
    """Return the counts of two requests, of which the first has stop strings; the target accepts
    three nodes of each."""
    return Counting(stop=["x"]).step(worker_counts([5, 5], [3, 3], [0, 0]), {"a": 3, "b": 3})


@pytest.fixture
def front_end() -> CutOff:
    """A front end that has seen statistics of an engine with trees."""
    found = CutOff()
    found.correct(step())
    return found


@pytest.mark.parametrize("kept", [1, 3])
def test_what_is_cut_off_is_neither_generated_nor_accepted(front_end: CutOff, kept: int) -> None:
    """Of four tokens of the step ``kept`` are returned; three came before."""
    stats, iteration = step(), SimpleNamespace(num_generation_tokens=8)
    request = ended("a", 3 + 4, 3 + kept)
    front_end.ended(request, iteration)
    front_end.correct(stats)
    assert request.stats.num_generation_tokens == 3 + kept
    assert iteration.num_generation_tokens == 4 + kept
    accepted = kept - 1
    assert stats.num_accepted_tokens == sum(stats.accepted_paths) == accepted + 3
    by_depth = [1 + (depth < accepted) for depth in range(3)]
    assert stats.accepted_by_depth == stats.num_accepted_tokens_per_pos[:3] == by_depth
    path = ("look_up", "draft", "both")
    assert stats.accepted_by_source == {name: 1 + (name in path[:accepted]) for name in path}
    assert stats.num_drafts == len(stats.accepted_paths) == 2


def test_counts_of_engines_without_trees_stay_as_they_are() -> None:
    front_end, request = CutOff(), ended("a", 7, 4)
    iteration = SimpleNamespace(num_generation_tokens=8)
    front_end.ended(request, iteration)
    assert (request.stats.num_generation_tokens, iteration.num_generation_tokens) == (7, 8)
