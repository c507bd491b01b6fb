"""Ways to break one mechanism of trees on recurrent layers at a time; `sabotage` says more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def _committing(runner: Any, change: Any) -> Iterator[None]:
    """Commit what ``change`` makes of a `Commit`."""
    from sabotage import verified_eagerly

    from dyntree_plugin.engine.states import committer

    stock = committer._commit
    changed = mock.patch.object(committer, "_commit", lambda *given: change(stock(*given)))
    with verified_eagerly(runner), changed:
        yield


@contextmanager
def commit_dropped(runner: Any) -> Iterator[None]:
    """Leave the states of requests with drafts as they are."""
    with _committing(runner, lambda commit: type(commit)(*(each[:0] for each in commit))):
        yield


@contextmanager
def commit_doubled(runner: Any) -> Iterator[None]:
    """Advance states along every path twice."""
    from dyntree_plugin.engine.states.layers import OnCPU

    stock = OnCPU.advance

    def advance(self: Any, *given: Any) -> None:
        stock(self, *given)
        stock(self, *given)

    with mock.patch.object(OnCPU, "advance", advance):
        yield


@contextmanager
def commit_of_a_sibling(runner: Any) -> Iterator[None]:
    """Commit, in place of every accepted node, the row before it."""

    def change(commit: Any) -> Any:
        paths = commit.paths.clone()
        paths[:, 1:] -= (paths[:, 1:] >= 0).int()
        return commit._replace(paths=paths)

    with _committing(runner, change):
        yield


@contextmanager
def commit_to_a_neighbour(runner: Any) -> Iterator[None]:
    """Advance the state of another request of the batch."""

    def change(commit: Any) -> Any:
        # Other requests may have no slot, and vLLM's operator writes to any.
        slots, real = commit.slots.clone(), commit.lengths > 0
        slots[real] = slots[real].roll(1)
        return commit._replace(slots=slots)

    with _committing(runner, change):
        yield


@contextmanager
def tree_as_chain(runner: Any) -> Iterator[None]:
    """Let every row continue from the row before it."""
    from dyntree_plugin.engine.states.builders import TreeStates

    stock = TreeStates.of

    def of(slots: Any, starts: Any, ctx_lens: Any, bits: Any) -> Any:
        return stock(slots, starts, torch.full_like(ctx_lens, -1), bits)

    with mock.patch.object(TreeStates, "of", of):
        yield


@contextmanager
def convolved_with_a_sibling(runner: Any) -> Iterator[None]:
    """Let convolutions read the row before a node, in place of its parent."""
    from dyntree_plugin.engine.states.builders import TreeStates

    stock = TreeStates.taps

    def taps(self: Any, width: int) -> Any:
        found = stock(self, width)
        found[:, -2] = torch.where(found[:, -2] >= 0, found[:, -1] - 1, found[:, -2])
        return found

    with mock.patch.object(TreeStates, "taps", taps):
        yield


@contextmanager
def commit_of_the_latest_forward(runner: Any) -> Iterator[None]:
    """Advance states by what the latest forward read, whichever the paths belong to."""
    from dyntree_plugin.engine.states.layers import OnCPU

    def advance(self: Any, commit: Any, number: int) -> None:
        (own, _), (raw, gates) = dict(self._read)[number], self._read[-1][1]
        rows = torch.arange(len(own)) % len(raw)
        commit(self.layer, raw[rows], gates[rows], self.kv_cache)

    with mock.patch.object(OnCPU, "advance", advance):
        yield


@contextmanager
def commit_of_another_forward(runner: Any) -> Iterator[None]:
    """On CUDA, advance states by what another forward read whose paths may still come."""
    from dyntree_plugin.engine.states.cuda_layers import Forwards

    stock = Forwards.of
    with mock.patch.object(Forwards, "of", lambda self, number: stock(self, number + 1)):
        yield


@contextmanager
def end_of_block_dropped(runner: Any) -> Iterator[None]:
    """Leave the prefix cache without the state where a block ends within an accepted path."""
    with _committing(runner, lambda commit: commit._replace(ends=0 * commit.ends)):
        yield


@contextmanager
def block_after_the_last_draft(runner: Any) -> Iterator[None]:
    """Let vLLM take the state from the slot of a draft, of which a tree has none.

    It is that of the first. Those of others may lie behind the table of blocks.
    """

    def commit_step(*_: Any, num_accepted_tokens: torch.Tensor, **__: Any) -> None:
        num_accepted_tokens.clamp_(max=2)

    with mock.patch.object(runner.model_state.recoverssm, "commit_step", commit_step):
        yield


@contextmanager
def states_left_behind(runner: Any) -> Iterator[None]:
    """Let a request begin a block without the state of the block before."""
    with mock.patch.object(runner.model_state._mamba_ctx, "run_fused_precopy"):
        yield


OF_BLOCKS = (end_of_block_dropped, block_after_the_last_draft, states_left_behind)
OF_COMMITS = (
    commit_dropped,
    commit_doubled,
    commit_of_a_sibling,
    commit_to_a_neighbour,
    tree_as_chain,
    convolved_with_a_sibling,
)
BROKEN = (*OF_COMMITS, *OF_BLOCKS)
