"""Ways to break what heads read of the target; `sabotage` offers them. Output must not change."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def broken_head(runner: Any) -> Iterator[None]:
    """Make some of a head's logits and hidden states not finite."""
    calls, head = itertools.count(), runner.speculator
    stock_run, stock_logits = head.run, head.compute_draft_logits

    def run(*given: Any) -> Any:
        hidden, states = stock_run(*given)
        states[next(calls) % 5 :: 5] = torch.nan
        return hidden, states

    def compute_draft_logits(*given: Any) -> Any:
        logits, first = stock_logits(*given), next(calls)
        logits[first % 3 :: 3, 7] = torch.nan
        logits[first % 7 :: 7] = -torch.inf
        return logits

    with (
        mock.patch.object(head, "run", run),
        mock.patch.object(head, "compute_draft_logits", compute_draft_logits),
    ):
        yield


@contextmanager
def other_rows(runner: Any) -> Iterator[None]:
    """Give a head the target's state at the root, in place of that at each accepted node."""
    from dyntree_plugin.engine.step.records import TargetStates

    def root_rows(self: Any, count: int) -> torch.Tensor:
        return self.root_rows[:, None].expand(-1, count)

    with mock.patch.object(TargetStates, "rows_before", root_rows):
        yield


@contextmanager
def other_parents(runner: Any) -> Iterator[None]:
    """Give a head's rows the root's state, in place of that of each node's parent."""
    source = runner.speculator.drafter.stages._source
    stock, own = source.forward, source._states.own

    def forward(rows: Any, *given: Any) -> Any:
        rows.above.copy_(rows.above // own.shape[1] * own.shape[1])
        return stock(rows, *given)

    with mock.patch.object(source, "forward", forward):
        yield


@contextmanager
def states_not_received(runner: Any) -> Iterator[None]:
    """Let a head read zeros for what the target's hidden states are. Output must not change."""
    from dyntree_plugin.engine.drafts.head import TargetHead

    def receive(head: Any, *_: Any) -> None:
        head._states.given.zero_()

    with mock.patch.object(TargetHead, "receive", receive):
        yield


BROKEN = (broken_head, other_rows, other_parents, states_not_received)
