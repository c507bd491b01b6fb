"""The adaptive budget of one synchronous rank: what it learns from steps, and what it decides."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.outputs import DraftTokenIds

from dyntree_kernels.contracts import RequestParams
from dyntree_plugin.engine.budget.by_tree import TreeBudget
from dyntree_plugin.engine.cpu.ops import CPUOps
from dyntree_plugin.engine.cpu.runner import TreeCPUModelRunner
from dyntree_plugin.engine.step.clock import Measured
from dyntree_plugin.engine.step.growth_stages import DraftStages
from dyntree_plugin.engine.step.records import Drafted, Step
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.budget.learned import FIRST_TREES
from dyntree_plugin.tree.budget.row_cost import RowCost
from dyntree_plugin.tree.token_tree import NO_VALUE

NODES = 8
FLAT, STEEP = (0.05, 0.05), (0.05, 0.17)
"""Seconds of one row and of nine."""


def batch(rows: int, prompts: tuple[int, ...] = (0,), length: int = 4) -> Any:
    """Requests with so many tokens of their prompt of ``length`` left; with 0, they decode."""
    left = np.array(prompts)
    return SimpleNamespace(
        num_reqs=len(left),
        num_tokens=rows,
        num_computed_tokens_np=length - left,
        num_scheduled_tokens=np.full(len(left), 2),
        prefill_len_np=np.full(len(left), length),
        is_prefilling_np=left > 0,
    )


def budget(
    seconds: tuple[float, float] = STEEP,
    requests: int = 1,
    of_position: float = 0.0,
    *,
    drawn_trees: bool = False,
) -> TreeBudget:
    """A budget with measured costs, whose requests all decode."""
    found = TreeBudget(NODES - 1, drawn_trees=drawn_trees)
    found.begin(batch(requests, (0,) * requests))
    found.measured(RowCost((1, 9), seconds, 40, of_position))
    return found


def values(*chances: float) -> torch.Tensor:
    row = torch.full((1, NODES), NO_VALUE)
    row[0, : len(chances)] = torch.tensor(chances).log()
    return row


def cut(found: TreeBudget, *trees: torch.Tensor, drawn: Sequence[bool] = ()) -> list[int]:
    together = torch.cat(trees)
    counts = (together > NO_VALUE).sum(dim=1)
    forwards = torch.arange(NODES).expand(together.shape)  # as of chains
    return found.cut(together, counts, forwards, np.array(drawn) if drawn else None).tolist()


def test_rows_that_are_expensive_with_context_are_left_out() -> None:
    """Control: where no more was measured with context, the tree is whole."""
    for of_position, kept in ((15e-6, 2), (0.0, 5)):
        found = budget(FLAT, of_position=of_position)
        found.begin(batch(1, length=1000))
        assert cut(found, values(0.9, 0.8, 0.3, 0.2, 0.1)) == [kept]


@pytest.mark.parametrize(
    ("prompts", "drafting", "learns"),
    [((0, 3), 1e-3, False), ((0, 0), 0.0, False), ((0, 0), 1e-3, True)],
)
def test_rows_become_expensive_by_steps_without_prompts_and_with_a_draft_alone(
    prompts: tuple[int, ...], drafting: float, learns: bool
) -> None:
    found, tree = budget(FLAT), values(0.9, 0.5, 0.2, 0.1, 0.1)
    for _ in range(300):
        found.observe(batch(2), 1, {"target": 0.05, "draft": drafting})
        found.observe(batch(6, prompts=prompts), 1, {"target": 100.0, "draft": drafting})
    found.observe(batch(1), 1, {"target": 0.05, "draft": 1e-3})
    assert (cut(found, tree)[0] < 5) == learns


def test_a_tree_whose_request_still_reads_its_prompt_is_not_cut() -> None:
    """It is not verified either, so its rows count for nothing. Control: its value decides."""
    found, tree = budget(STEEP, requests=3), values(1e-3, 1e-4)
    assert cut(found, tree, tree, tree) == [0, 0, 0]
    found.begin(batch(6, prompts=(0, 2, 3)))
    assert cut(found, tree, tree, tree) == [0, 0, 2]


CHAIN = values(0.9, 0.8, 0.7, 0.3, 0.02, 0.01)


def taught(*drawn: bool) -> TreeBudget:
    """A budget that has cut the same trees and chains for long."""
    found = budget(requests=len(drawn))
    for _ in range(100):
        cut(found, *[CHAIN] * len(drawn), drawn=drawn)
    return found


def test_trees_take_the_rows_that_chains_leave() -> None:
    found = taught(True, False)
    chain, tree = cut(found, CHAIN, values(0.9, 0.85), drawn=[True, False])
    assert (chain, tree) == (3, 2)
    assert cut(found, CHAIN, values(0.01), drawn=[True, False]) == [3, 0]


def test_drafting_of_chains_ends_where_its_next_token_is_not_expected_to_pay() -> None:
    found = taught(True)
    cut(found, CHAIN, drawn=[True])
    going = [found.drafting_pays(values(chance)) for chance in (0.95, 0.9, 0.3)]
    assert going == [True, True, False]
    cut(found, CHAIN, drawn=[True])
    assert found.drafting_pays(values(0.9)), "another step begins"
    assert not found.drafting_pays(values(1e-3))


def test_nothing_is_drafted_for_prompts_whose_trees_the_next_step_does_not_verify() -> None:
    """Such a request does not decide for others either. Control: one that decodes does."""
    found = taught(True)
    found.begin(batch(4, prompts=(3,)))
    assert not found.drafting_pays(values(0.95))
    assert cut(found, CHAIN, drawn=[True]) == [6]
    found.begin(batch(4))
    assert found.drafting_pays(values(0.9))
    for left, pays in (((0, 3), False), ((0, 0), True)):
        found = taught(True, True)
        cut(found, CHAIN, CHAIN, drawn=[True, True])
        found.begin(batch(4, prompts=left))
        assert found.drafting_pays(torch.cat([values(1e-3), values(0.95)])) == pays


@pytest.mark.parametrize(("chances", "runs"), [((0.9, 0.8), True), ((1e-3,), False)])
def test_a_forward_that_does_not_pay_is_not_run(chances: tuple[float, ...], runs: bool) -> None:
    """Control: without the budget it is run."""
    found = budget()
    for _ in range(200):
        found.observe(batch(2), 2, {"target": 0.05, "draft": 0.02})
    for _ in range(FIRST_TREES + 1):
        cut(found, values(0.9, 0.8))
    ran: list[str] = []
    growth: Any = SimpleNamespace(
        expand=lambda bits: 1, frontier_values=values(*chances), pick=lambda logits: None
    )
    source: Any = SimpleNamespace(
        rows=lambda requests, width: SimpleNamespace(ancestor_bits=None),
        forward=lambda rows, requests, first: ran.append("forward"),
    )
    of_requests = RequestParams.room(1, torch.device("cpu"))
    for ops, expected in ((CPUOps(found), runs), (CPUOps(), True)):
        stages = DraftStages(
            growth,
            of_requests,
            source=source,
            writer=source,
            tries=None,
            widths=[1],
            max_depth=1,
            chained=torch.zeros(2).bool(),
            pays=ops.pays,
        )
        assert stages.forward(Requests(torch.zeros(1, 8).long(), 1), 0) == expected
    assert len(ran) == 1 + runs


@pytest.mark.parametrize(("least", "runs"), [(0.2, True), (0.9, False)])
def test_a_better_node_may_take_the_row_of_the_least(least: float, runs: bool) -> None:
    """A step has no more rows, or they are thought dear. Control: every node is as good."""
    found = TreeBudget(NODES - 1)
    found.begin(batch(1))
    found.measured(RowCost((1, 6, 7), (0.05, 0.05, 0.5), 7))
    tree = values(0.95, 0.94, 0.93, 0.92, least)
    for _ in range(FIRST_TREES + 1):
        assert cut(found, tree) == [5]
    assert found.drafting_pays(values(0.9)) == runs


@pytest.mark.parametrize(
    ("of_trees", "growth", "offered"), [(True, 1, 2), (True, None, 5), (False, 1, 5)]
)
def test_the_runner_offers_the_scheduler_the_nodes_that_pay(
    of_trees: bool, growth: int | None, offered: int
) -> None:
    """Without growth it judges no tree: that in the slot is an earlier one. Control: a runner that
    does not size single trees offers the whole tree, without padding."""
    drafts = DraftTokenIds(["a"], [list(range(NODES))])
    runner = object.__new__(TreeCPUModelRunner)
    runner._budget = TreeBudget() if of_trees else None
    runner.recent_drafts = SimpleNamespace(take=lambda: drafts)  # type: ignore[assignment]
    runner._node_limits = torch.full((2,), NODES)
    runner.scheduler_config = SimpleNamespace(async_scheduling=False)  # type: ignore[assignment]
    runner.trees = TreeStore(2, DynTreeOptions().resolve(NODES), 8, torch.device("cpu"))
    runner.trees.values[1] = values(0.9, 0.8, 0.3, 0.2, 0.1)[0]
    runner.trees.counts[1] = runner.trees.admitted[1] = 5
    runner.req_states = SimpleNamespace(req_id_to_index={"a": 1})  # type: ignore[assignment]
    runner.step = Step(drafted=Drafted(None, 2, growth))
    runner._plain_steps = SimpleNamespace()  # type: ignore[assignment]  # costs were measured
    runner.take_row_cost(RowCost((1, 9), STEEP, 40))
    if runner._budget is not None:
        runner._budget.begin(batch(6))
    runner.step_ended(batch(6), Measured({"target": 0.125, "draft": 1e-3}))
    found = runner.take_draft_token_ids()
    assert found is not None
    assert found.draft_token_ids == [list(range(offered))]
    assert int(runner.trees.admitted[1]) == offered


def test_a_step_is_expected_to_take_what_its_rows_and_forwards_took() -> None:
    found = budget()
    times = {"target": 0.125, "draft": 0.05}
    for forwards in (4, 4, 2):
        seconds = found.observe(batch(6), forwards, times)
    # A forward took a quarter of 0.05 s, and the steps of as many rows 0.125 s.
    assert seconds == (pytest.approx(0.15, rel=0.02), pytest.approx(0.175), 0.0)


def forwards_of(found: TreeBudget, last: float, drawn: bool) -> int:
    """Return the forwards of a step with such frontiers, after 40 steps whose trees were chains."""
    for step in range(41):
        frontiers = CHAIN if step < 40 else torch.full((1, NODES), last).log()
        forwards = 0
        while forwards < NODES - 1 and found.drafting_pays(frontiers[:, forwards : forwards + 1]):
            forwards += 1
        found.observe(batch(3), 1 + forwards, {"target": 0.05, "draft": 3e-3 * (1 + forwards)})
        cut(found, CHAIN, drawn=[drawn])
    return forwards


@pytest.mark.parametrize("drawn", [True, False])
def test_drawn_trees_are_drafted_as_far_as_that_paid_in_earlier_steps(drawn: bool) -> None:
    """Whether a step goes on may not depend on what it drew. Control: of other trees it does."""
    good, poor = (forwards_of(budget(FLAT, drawn_trees=drawn), last, drawn) for last in (0.9, 1e-4))
    assert 0 < good < NODES - drawn
    assert (poor == good) == drawn


@pytest.mark.parametrize("drawn", [True, False])
def test_the_first_trees_are_drafted_with_every_forward(drawn: bool) -> None:
    """Whatever they are worth. Control: later ones are not."""
    found, made = budget(drawn_trees=drawn), []
    for _ in range(FIRST_TREES + 2):
        made.append(0)
        while made[-1] < NODES - 1 and found.drafting_pays(values(1e-3)):
            made[-1] += 1
        found.observe(batch(3), 1 + made[-1], {"target": 0.05, "draft": 3e-3 * (1 + made[-1])})
        cut(found, values(1e-3, 1e-4), drawn=[drawn])
    *first, _, last = made  # between them, more forwards are tried
    assert (first, last) == ([NODES - 1] * FIRST_TREES, 0)
    found.forget()
    assert found.drafting_pays(values(1e-3)), "other weights are as new"


@pytest.mark.parametrize(("steps", "whole"), [(FIRST_TREES - 1, True), (FIRST_TREES, False)])
def test_trees_that_no_forward_could_extend_are_whole(steps: int, whole: bool) -> None:
    found = budget()
    for _ in range(steps):
        cut(found, values(1e-3))
    assert found._choice.choose(1, lambda _: np.ones(40), np.ones(NODES)).whole == whole
