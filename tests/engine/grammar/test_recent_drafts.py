"""The scheduler gets the drafts of the batch that it asks about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from dyntree_plugin.engine.grammar.drafts import RecentDrafts, TreeDrafts


def draft(recent: RecentDrafts, requests: list[str], first: int, *, trees: bool = True) -> None:
    """Run a step that drafts two nodes of each request, the second below the first."""
    tokens = torch.arange(2 * len(requests)).reshape(-1, 2) + first
    batch: Any = SimpleNamespace(req_ids=requests, has_structured_output_reqs=trees)
    recent.next_step().set_draft_tokens(batch, tokens)
    if trees:
        parents = torch.tensor([[2, -1, 0]]).expand(len(requests), 3)
        recent.add_parents(lambda: parents)


def of(recent: RecentDrafts) -> dict[str, list[int]]:
    found = recent.take()
    assert isinstance(found, TreeDrafts)
    assert found.parents == [[-1, 0]] * len(found.req_ids)
    return dict(zip(found.req_ids, found.draft_token_ids, strict=True))


def test_a_pipeline_hands_over_the_drafts_of_every_batch_that_is_under_way() -> None:
    recent = RecentDrafts(2, torch.device("cpu"))
    draft(recent, ["a", "b"], 10)
    draft(recent, ["c"], 20)
    assert of(recent) == {"a": [10, 11], "b": [12, 13], "c": [20, 21]}
    draft(recent, ["a"], 30)
    assert of(recent) == {"c": [20, 21], "a": [30, 31]}


def test_one_stage_hands_over_its_last_step() -> None:
    recent = RecentDrafts(1, torch.device("cpu"))
    draft(recent, ["a"], 10)
    draft(recent, ["b"], 20)
    assert of(recent) == {"b": [20, 21]}


def test_steps_whose_trees_nobody_needs_have_no_parents() -> None:
    recent = RecentDrafts(2, torch.device("cpu"))
    draft(recent, ["a"], 10, trees=False)
    draft(recent, ["b"], 20, trees=False)
    found = recent.take()
    assert found is not None
    assert not isinstance(found, TreeDrafts)
    assert found.req_ids == ["b"]
    draft(recent, ["c"], 30)
    assert of(recent) == {"c": [30, 31]}
    draft(recent, ["d"], 40, trees=False)
    assert of(recent) == {"c": [30, 31]}
