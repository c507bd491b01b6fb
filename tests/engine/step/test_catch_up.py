"""The rows with which a draft reads prompts and emitted tokens, and when trees grow after them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dyntree_kernels.contracts import Walked
from dyntree_plugin.engine.cpu.ops import CPUOps
from dyntree_plugin.engine.step.catch_up import CatchUpPlan
from dyntree_plugin.engine.step.clock import StageClock
from dyntree_plugin.engine.step.draft import Drafter
from dyntree_plugin.engine.step.ops import NoGraphs
from dyntree_plugin.engine.step.records import Drafted, Emitted, Sampled, Step
from dyntree_plugin.engine.step.requests import COLUMNS


def batch(
    scheduled: list[int],
    prefilling: list[bool] | None = None,
    drafts: list[int] | None = None,
    bounds: list[int] | None = None,
) -> Any:
    """Return requests with so many rows and drafts, and ``bounds`` of their lengths; by default
    they decode."""
    lengths = torch.tensor(scheduled)
    return SimpleNamespace(
        num_reqs=len(scheduled),
        num_scheduled_tokens=np.array(scheduled),
        is_prefilling_np=np.array(prefilling or [False] * len(scheduled)),
        num_draft_tokens_per_req=None if drafts is None else np.array(drafts),
        seq_lens_cpu_upper_bound=torch.tensor(bounds or scheduled),
        idx_mapping=torch.arange(len(scheduled)),
        positions=torch.arange(int(lengths.sum())),
        query_start_loc=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
    )


def plan(*given: Any, max_depth: int = 3, shift: int = 0) -> CatchUpPlan:
    return CatchUpPlan.of(batch(*given), max_depth, shift)


def rows(plan: CatchUpPlan) -> list[list[str]]:
    """Return what each row of a request reads: prompt token i as "p<i>", emitted token i as
    "e<i>"."""
    request, token, starts, known, _, _ = plan.to(torch.device("cpu"))
    found: list[list[str]] = [[] for _ in plan.known]
    for r, i in zip(request.tolist(), token.tolist(), strict=True):
        before = int(known[r])
        found[r].append(f"p{i}" if i < before else f"e{i - before}")
    assert starts.tolist() == np.cumsum([0, *map(len, found)]).tolist()
    return found


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


def test_a_head_reads_a_chunk_one_token_later_and_trees_as_a_draft_model_does() -> None:
    found = rows(plan([10, 3, 1], [False, True, False], [9, 0, 0], shift=-1))
    assert found == [["e0", "e1", "e2", "e3"], ["p1", "p2", "e0"], ["e0"]]
    assert rows(plan([1, 10], [True, True], [0, 9], shift=-1)) == [["e0"], ["e0"]]


@pytest.mark.parametrize("shift", [0, -1])
def test_masks_come_last_and_none_beyond_the_longest_text(shift: int) -> None:
    """The longest text has 12 tokens. After a prompt of 5 all three masks have a row, after one of
    10 and its first token one; masks of a decoding request follow all that it can have got."""
    given = batch([3, 2, 10], [True, True, False], [0, 0, 9], [5, 10, 13])
    made = CatchUpPlan.of(given, 1, shift, masks=3, last_position=11)
    chunk = [f"p{i}" for i in range(-shift, 3)]
    assert rows(made) == [
        [*chunk, "e0", "e1", "e2", "e3"],
        [*chunk[:-1], "e0", "e1"],
        ["e0", "e1", "e2", "e3", "e4"],
    ]
    # The last row's position, and so its slot, is at most that of the longest text's last token.
    assert made.longest(given).tolist() == [9 + shift, 12 + shift, 9 + shift]


@pytest.mark.parametrize(("shift", "ends"), [(0, [9, 11, 25]), (-1, [8, 10, 24])])
def test_the_host_knows_where_the_rows_of_prompts_end(shift: int, ends: list[int]) -> None:
    """Seven tokens are computed of two prompts, one of which is filled up, and twenty of a
    decoding request, whose emitted tokens may be fewer."""
    given = [10, 3, 10], [True, True, False], [9, 0, 9], [17, 10, 30]
    assert plan(*given, shift=shift).longest(batch(*given)).tolist() == ends


class Noting:
    """Drafting stages that only note their calls."""

    widths = (4, 4)
    device = torch.device("cpu")
    shift = 0

    def __init__(self, has_draft: bool = True) -> None:
        self.done: list[str] = []
        self.has_draft = has_draft

    def receive(self, *_: Any) -> None:
        pass

    def catch_up(self, _: Any, emitted: Emitted) -> None:
        self.done.append(f"read {emitted.most}")

    def catch_up_prompts(self, *_: Any) -> None:
        self.done.append("read prompts")

    def root(self, *_: Any, **__: Any) -> None:
        self.done.append("root")

    def forward(self, *_: Any) -> bool:
        self.done.append("forward")
        return True

    def finish(self) -> torch.Tensor:
        return torch.full((2, 4), self.done.count("forward"))


def draft(
    batch: Any,
    ops: Any,
    step: Step,
    *,
    grows: bool = True,
    max_depth: int = 8,
    has_draft: bool = True,
) -> tuple[list[str], Drafted]:
    """Return the noted calls, and the result of drafting."""
    stages: Any = Noting(has_draft)
    drafter = Drafter(stages, ops, NoGraphs(), max_depth=max_depth, spare=2)
    packed, last = torch.zeros(2, COLUMNS, dtype=torch.int64), torch.zeros(2, 1).long()
    sampled = Sampled(torch.zeros(2), last, torch.zeros(2), ())
    drafted = drafter.draft(step, packed, batch, sampled, grows=grows)
    return stages.done, drafted


def ops_of(most_emitted: Any) -> Any:
    return SimpleNamespace(clock=StageClock(), most_emitted=most_emitted)


def on_cuda(bound: int, emitted: torch.Tensor) -> int:
    return bound


@pytest.mark.parametrize(("grows", "done"), [(True, ["root", *["forward"] * 2]), (False, [])])
def test_without_a_draft_model_nothing_catches_up(grows: bool, done: list[str]) -> None:
    """Control: with one the same batch reads a row for each request."""
    found, drafted = draft(batch([1, 1]), ops_of(on_cuda), Step(), grows=grows, has_draft=False)
    assert found == done
    assert drafted.forwards == done.count("forward")
    control, drafted = draft(batch([1, 1]), ops_of(on_cuda), Step(), grows=grows)
    assert control == ["read 1", *done]
    assert drafted.forwards == 1 + done.count("forward")


@pytest.mark.parametrize("grows", [True, False])
def test_where_nobody_can_verify_a_draft_the_prompt_is_read_and_no_tree_grows(grows: bool) -> None:
    done, drafted = draft(batch([3, 3], [True, True]), ops_of(on_cuda), Step(), grows=grows)
    assert done == ["read prompts", *(["root", "forward", "forward"] if grows else [])]
    assert (drafted.tokens is not None) == grows
    assert (drafted.forwards, drafted.growth_forwards) == ((3, 2) if grows else (1, None))


@pytest.mark.parametrize(("most", "forwards"), [(None, 2), (0, 0), (1, 1), (9, 2)])
def test_the_scheduler_bounds_the_draft_forwards(most: int | None, forwards: int) -> None:
    done, drafted = draft(batch([1, 1]), ops_of(on_cuda), Step(most))
    assert done == ["read 1", "root", *["forward"] * forwards]
    assert drafted.tokens is not None
    assert (drafted.tokens == forwards).all()
    assert (drafted.forwards, drafted.growth_forwards) == (1 + forwards, forwards)


@pytest.mark.parametrize(
    ("most_emitted", "rows"), [(on_cuda, 9), (CPUOps().most_emitted, 3)], ids=["cuda", "cpu"]
)
def test_the_draft_runs_over_as_many_tokens_as_the_host_can_tell_were_emitted(
    most_emitted: Any, rows: int
) -> None:
    of_requests = {name: torch.zeros(2, dtype=torch.int64) for name in Walked._fields}
    step = Step(verified=Walked(**of_requests | {"emitted": torch.tensor([1, 3])}))
    done, _ = draft(batch([17, 11], drafts=[16, 10]), ops_of(most_emitted), step)
    assert done[0] == f"read {rows}"
