"""The rows of the draft's catch-up forward."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_cpu_runner import install

install()  # the runner's modules need it before they are imported

from dyntree_plugin.engine.cpu.speculator import CPUTreeSpeculator  # noqa: E402
from dyntree_plugin.engine.step.draft import CatchUpPlan, TreeSpeculator  # noqa: E402
from dyntree_plugin.engine.step.forwards import DraftForwards, Emitted  # noqa: E402
from dyntree_plugin.engine.step.requests import COLUMNS  # noqa: E402
from dyntree_plugin.engine.step.trees import TreeStore  # noqa: E402
from dyntree_plugin.engine.step.verify import Verification  # noqa: E402
from dyntree_plugin.options import DynTreeOptions  # noqa: E402
from dyntree_plugin.tree.shape import TreeShape  # noqa: E402


def plan(
    scheduled: list[int], prefilling: list[bool], drafts: list[int] | None, max_depth: int = 3
) -> CatchUpPlan:
    batch: Any = SimpleNamespace(
        num_reqs=len(scheduled),
        num_scheduled_tokens=np.array(scheduled),
        is_prefilling_np=np.array(prefilling),
        num_draft_tokens_per_req=None if drafts is None else np.array(drafts),
    )
    return CatchUpPlan.of(batch, max_depth)


def rows(plan: CatchUpPlan) -> list[list[str]]:
    """Per request what each row runs on: prompt token i as "p<i>", emitted token i as "e<i>"."""
    request, offset, starts, carried = plan.to(torch.device("cpu"))
    found: list[list[str]] = [[] for _ in plan.carried]
    for r, i in zip(request.tolist(), offset.tolist(), strict=True):
        prompt = int(carried[r])
        found[r].append(f"p{i}" if i < prompt else f"e{i - prompt}")
    assert starts.tolist() == np.cumsum([0, *map(len, found)]).tolist()
    return found


def test_a_request_in_its_prompt_brings_its_chunk_and_the_token_sampled_after_it() -> None:
    assert rows(plan([4, 1], [True, True], None)) == [["p0", "p1", "p2", "p3", "e0"], ["p0", "e0"]]


def test_a_decoding_request_brings_what_its_tree_may_have_emitted() -> None:
    assert rows(plan([10], [False], [9])) == [["e0", "e1", "e2", "e3"]]


def test_a_tree_cut_below_its_depth_emits_no_more_than_its_nodes_and_a_bonus_token() -> None:
    assert rows(plan([2, 1], [False, False], [1, 0])) == [["e0", "e1"], ["e0"]]


def test_prompts_and_trees_share_a_batch() -> None:
    found = rows(plan([10, 3, 1], [False, True, False], [9, 0, 0]))
    assert found == [["e0", "e1", "e2", "e3"], ["p0", "p1", "p2", "e0"], ["e0"]]


def test_a_request_that_is_filled_up_with_drafts_brings_its_last_token_of_the_prompt_alone() -> (
    None
):
    found = rows(plan([10, 10], [True, False], [9, 9]))
    assert found == [["p0", "e0"], ["e0", "e1", "e2", "e3"]]


@pytest.mark.parametrize("drafts", [None, [0, 0]])
def test_a_step_without_drafts_emits_one_token_per_request(drafts: list[int] | None) -> None:
    assert plan([1, 1], [False, False], drafts).num_rows == 2


class Noting:
    """Runs no draft, and notes what it would have done. Stands before a speculator."""

    def __init__(self) -> None:
        self.verified = None
        clock: Any = lambda stage: nullcontext()  # noqa: E731
        self._clock = clock
        self.draft_tokens = torch.zeros(2, 4, dtype=torch.int64)
        self.done: list[str] = []

    def _pack(self, *_: Any) -> torch.Tensor:
        return torch.zeros(2, COLUMNS, dtype=torch.int64)

    def _catch_up(self, *_: Any) -> Any:
        self.done.append("read")

    def _grow_behind(self, *_: Any) -> torch.Tensor:
        self.done.append("grow")
        return self.draft_tokens

    def _draft(self, packed: torch.Tensor, emitted: Emitted, greedy: bool) -> torch.Tensor:
        self.done.append(f"draft over {emitted.most}")
        return self.draft_tokens


class NotingTreeSpeculator(Noting, TreeSpeculator):
    pass


class NotingCPUTreeSpeculator(Noting, CPUTreeSpeculator):
    pass


def propose(speculator: Any, batch: Any, asked: int | None = None) -> torch.Tensor:
    of_requests = dict.fromkeys(("temperature", "seeds", "next_prefill_tokens"), torch.zeros(2))
    tokens: torch.Tensor = speculator.propose(
        batch,
        {},
        {},
        last_hidden_states=torch.empty(0),
        aux_hidden_states=None,
        num_sampled=torch.zeros(2),
        num_rejected=torch.zeros(2),
        last_sampled=torch.zeros(2, 1, dtype=torch.int64),
        num_speculative_tokens=asked,
        **of_requests,
    )
    return tokens


@pytest.mark.parametrize(
    ("asked", "done"), [(4, ["read", "grow"]), (None, ["read", "grow"]), (0, ["read"])]
)
def test_where_nobody_can_verify_a_draft_the_prompt_is_read_and_no_tree_grows(
    asked: int | None, done: list[str]
) -> None:
    speculator: Any = NotingTreeSpeculator()
    batch: Any = SimpleNamespace(
        num_reqs=2, idx_mapping=torch.arange(2), is_prefilling_np=np.ones(2, dtype=bool)
    )
    tokens = propose(speculator, batch, asked)
    assert speculator.done == done
    assert tokens.shape == (2, 4)


@pytest.mark.parametrize(
    ("kind", "rows"), [(NotingTreeSpeculator, 9), (NotingCPUTreeSpeculator, 3)]
)
def test_the_draft_runs_over_as_many_tokens_as_the_host_can_tell_were_emitted(
    kind: type[Any], rows: int
) -> None:
    speculator = kind()
    speculator.shape = TreeShape(node_budget=16, max_depth=8, width=4, children=4)
    of_requests = {name: torch.zeros(2, dtype=torch.int64) for name in Verification.__annotations__}
    speculator.verified = Verification(**of_requests | {"emitted": torch.tensor([1, 3])})
    batch: Any = SimpleNamespace(
        num_reqs=2,
        is_prefilling_np=np.zeros(2, dtype=bool),
        num_draft_tokens_per_req=np.array([16, 10]),
    )
    propose(speculator, batch)
    assert speculator.done == [f"draft over {rows}"]


@pytest.mark.parametrize(("max_depth", "rows"), [(1, 2), (3, 4)])
def test_trees_of_roots_children_alone_need_the_rows_of_the_catch_up(
    max_depth: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing below the roots is expanded, so that there is no width of a forward."""
    told: list[Any] = []
    monkeypatch.setattr(DraftForwards, "__init__", lambda self, *args: told.extend(args))
    plan = DynTreeOptions(max_depth=max_depth).resolve(4)
    trees = TreeStore(2, plan, 8, torch.device("cpu"))
    pieces: Any = (trees, None, None, None, None)
    TreeSpeculator(SimpleNamespace(), torch.device("cpu"), *pieces)  # type: ignore[arg-type]
    assert told[2] == rows
