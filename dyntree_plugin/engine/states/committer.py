"""Advances the states of recurrent layers along accepted paths."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from dyntree_kernels.recurrence import Commit
from dyntree_plugin.engine.layer_kinds import AcceptedPaths


def committer(
    layers: Collection[Any], requests: int
) -> Callable[[AcceptedPaths, torch.Tensor], None]:
    """Make what keeps paths in layers `WithStates` of one KV cache group.

    ``requests``: the most of the engine. The places are slots of states, negative for a request
    whose state the forward has advanced; the number of the forward, negative without drafts; and
    `ends` and `end_slots` as in `Commit`.
    """
    each = [*layers]
    advance = each[0].together(each)

    def keep(accepted: AcceptedPaths, places: torch.Tensor) -> None:
        advance(_commit(accepted, places, requests), places[0, 1])

    return keep


class OneStatePerRequest:
    """Stands in the state of a model with recurrent layers, in place of vLLM's ``RecoverSSMState``.

    Where states are cached, vLLM copies a request's state from block to block. It takes the state
    after the last accepted token from the slots of its drafts, and a tree has no such slots.
    """

    def record_step(self, *_: Any, **__: Any) -> None:
        """Do nothing: the metadata's builders note the slots."""

    def commit_step(self, *_: Any, num_accepted_tokens: torch.Tensor, **__: Any) -> None:
        """Let the next copies take the only state; the paths were kept before."""
        num_accepted_tokens.fill_(1)


def _commit(accepted: AcceptedPaths, places: torch.Tensor, requests: int) -> Commit:
    """Return the batch rows to commit: of each request its root, and then the accepted path."""
    path, roots = accepted.path, accepted.roots[:, None]
    slots, _, ends, end_slots = places[: len(path)].unbind(1)
    real = (slots >= 0) & (accepted.requests >= 0) & (accepted.requests < requests)
    rows = torch.cat([roots, torch.where(path >= 0, roots + 1 + path, -1)], dim=1)
    return Commit(slots, rows, (rows >= 0).sum(1) * real, ends, end_slots)
