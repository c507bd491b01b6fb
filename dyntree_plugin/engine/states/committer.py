"""Advances the states of recurrent layers along accepted paths."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from dyntree_kernels.recurrence import Commit
from dyntree_plugin.engine.layer_kinds import Accepted


def committer(layers: Collection[Any], requests: int) -> Callable[[Accepted, torch.Tensor], None]:
    """Make what keeps paths in layers `WithStates` of one KV cache group.

    ``requests``: the most of the engine. The places are slots of states, negative for a request
    whose state the forward has advanced, and the number of the forward, negative without drafts.
    """
    (prepared,) = {layer.prepared for layer in layers}

    def keep(accepted: Accepted, places: torch.Tensor) -> None:
        given = prepared(_commit(accepted, places[:, 0], requests), places[0, 1])
        for layer in layers if given else ():
            layer.advance(*given)

    return keep


def _commit(accepted: Accepted, places: torch.Tensor, requests: int) -> Commit:
    """Return the batch rows to commit: of each request its root, and then the accepted path."""
    slots, path, roots = places[: len(accepted.path)], accepted.path, accepted.roots[:, None]
    real = (slots >= 0) & (accepted.requests >= 0) & (accepted.requests < requests)
    rows = torch.cat([roots, torch.where(path >= 0, roots + 1 + path, -1)], dim=1)
    return Commit(slots, rows, (rows >= 0).sum(1) * real)
