"""SpecInfer's merge: each draft of a pool grows a tree, and equal paths become one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from growing import grow, log_probs_after, paths_at, paths_of
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.growths import Path

from dyntree_kernels.contracts import RequestParams, RowBuffers
from dyntree_kernels.cpu.gumbel import perturbed_logits
from dyntree_plugin.engine.papers.tensor_growth import TensorGrowth
from dyntree_plugin.engine.step.rows import GrowthMemory
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import ChildPicker, top_children
from dyntree_plugin.tree.growth import GrowthConfig, GrowthPlan
from dyntree_plugin.tree.papers import static
from dyntree_plugin.tree.papers.merge import merged
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.registry import plan_growth
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import Draws, TokenTree
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class

configurations = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
pools = st.lists(st.tuples(*[st.integers(0, 10_000)] * 3), min_size=1, max_size=3)


def plan_of(k: tuple[int, ...], drafts: int) -> GrowthPlan:
    shape = TreeShape(node_budget=39 * drafts, max_depth=6, width=4, children=4, drafts=drafts)
    return plan_growth(GrowthConfig("expansion", k, "best"), shape)


def grow_of_pools(
    plan: GrowthPlan, seeds: list[tuple[int, ...]], room: int | None = None
) -> TokenTree:
    """Grow one tree per pool of drafts, of which each is given by its seed."""
    columns = plan.scratch_slots if room is None else room
    growth = plan.start(len(seeds), torch.full((len(seeds),), columns))
    known: list[list[Path]] = [[] for _ in seeds]
    paths: list[list[Path]] = [[()] * plan.roots for _ in seeds]
    for width in (*plan.widths, None):
        log_probs = torch.stack([
            log_probs_after(pool[at * len(pool) // len(row)], path)
            for pool, row in zip(seeds, paths, strict=True)
            for at, path in enumerate(row)
        ]).float()  # fmt: skip
        found = top_children(log_probs, plan.children)
        growth.add(*(each.view(len(seeds), -1, plan.children) for each in found))
        if width is not None:
            frontier = growth.frontier()
            paths = [paths_at(frontier, row, known[row]) for row in range(len(seeds))]
    return growth.finish()


@settings(max_examples=30, deadline=None)
@given(configurations, pools, st.integers(2, 3))
def test_a_merged_tree_has_the_paths_of_all_its_drafts_trees(
    k: tuple[int, ...], seeds: list[tuple[int, ...]], drafts: int
) -> None:
    seeds = [pool[:drafts] for pool in seeds]
    tree = grow_of_pools(plan_of(k, drafts), seeds)
    tree.check()
    for row, pool in enumerate(seeds):
        alone = grow(plan_of(k, 1), list(pool))
        expected = {path for draft in range(drafts) for path in paths_of(alone, draft)}
        found = paths_of(tree, row)
        assert len(found) == len({*found})
        assert {*found} == expected


def test_unmerged_trees_are_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the tests above."""
    monkeypatch.setattr(static, "merged", lambda tree, levels: tree)
    with pytest.raises(ValueError, match="two children of -1 carry one token"):
        grow_of_pools(plan_of((2, 1), 2), [(5, 5)]).check()


def test_trees_that_were_drawn_are_not_merged() -> None:
    tree = grow(plan_of((2,), 1), [1])
    draws = Draws(torch.zeros(1), torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="drawn trees cannot be merged"):
        merged(replace(tree, draws=draws), 1)
    shape = TreeShape(node_budget=8, max_depth=2, width=1, children=2, drafts=2)
    for sampling in ("with_replacement", "without_replacement"):
        with pytest.raises(ValueError, match=f"sampling={sampling} is for one draft.*best"):
            plan_growth(GrowthConfig("expansion", (2,), sampling), shape)


def test_a_request_that_must_have_a_chain_has_that_of_the_first_draft() -> None:
    shape = TreeShape(node_budget=12, max_depth=2, width=1, children=2, drafts=2)
    plan = TreePlan(shape, GrowthConfig("expansion", (2, 2), "best"), "match", calibration=False)
    rows = RowBuffers(
        torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64),
        torch.zeros(1, 8, dtype=torch.int64), torch.arange(8)[None],
        torch.zeros(8, dtype=torch.int64),
    )  # fmt: skip
    trees = TreeStore(2, plan, 9, torch.device("cpu"))
    pick = ChildPicker(plan, perturbed_logits, AcceptanceEstimate("cpu"))
    of_requests = RequestParams.room(2, torch.device("cpu"))
    growth = TensorGrowth(trees, pick, GrowthMemory(of_requests, rows, last_position=50))
    cold = torch.zeros(2)
    seeds, chained = torch.tensor([1, 2]), torch.tensor([True, False])
    roots, levels, slots = torch.tensor([4, 7]), torch.tensor([9, 9]), torch.arange(2)
    classes = temperature_class(cold)
    of_requests.fill(RequestParams(roots, cold, classes, seeds, chained, levels, slots))
    growth.start(2)
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(3))
    growth.pick(logits)
    growth.expand(torch.zeros(8, 1, dtype=torch.int32))
    below = torch.randn(8, 9, generator=torch.Generator().manual_seed(4))
    growth.pick(below)
    tokens = growth.finish()
    assert trees.counts[:2].tolist()[0] == 2
    assert tokens[0, :2].tolist() == [int(logits[0].argmax()), int(below[0].argmax())]
    assert trees.parents[0, :2].tolist() == [-1, 0]
    assert int(trees.counts[1]) > 6
