"""Trees through recurrent layers: the oracle of the kernels.

It computes a tree as one chunk whose causal mask is the ancestor mask, as TreeWY
(arXiv 2608.20961) and STree (arXiv 2505.14969) do. An ancestor of an ancestor is an ancestor, so
each row's result depends on its path alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Chunk(NamedTuple):
    """A chunk's results for a commit: sums of log decays [H, n] from the root on, and the rows'
    ``updates`` [H, n, V] of the state."""

    decays: torch.Tensor
    updates: torch.Tensor


def tree_chunk(
    seen: torch.Tensor,
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_decay: torch.Tensor,
    *,
    delta: bool,
) -> tuple[torch.Tensor, Chunk]:
    """Run the n rows of a tree through a layer of H heads as one chunk.

    Along a path, S = exp(log_decay) S, u = beta (v - S^T k) or without ``delta`` u = beta v, then
    S = S + k u^T, and the output is S^T q. For Mamba-2, k is B, q is C, v is x and beta is dt.

    Args:
        seen: bool [n, n]: whether row i is row j or below it. Parents come before children.
        state: [H, K, V], before the root.
        q, k: [H, n, K]; v: [H, n, V]; beta, log_decay: [H, n].

    Returns:
        The outputs [H, n, V], and what `committed` needs.
    """
    decays = log_decay @ seen.to(log_decay.dtype).T
    # An ancestor's sum is the larger one. The clamp keeps other pairs, which are masked, finite.
    between = (decays[..., None] - decays[:, None]).clamp(max=0).exp()
    kept = decays.exp()[..., None]
    updates = beta[..., None] * v
    if delta:
        updates = updates - beta[..., None] * ((k * kept) @ state)
        strict = seen & ~torch.eye(len(seen), dtype=torch.bool, device=seen.device)
        system = beta[..., None] * (k @ k.mT) * between * strict
        # By substitution in at least float32. A product of powers loses keys that are alike.
        eye = torch.eye(len(seen), dtype=k.dtype, device=seen.device)
        updates = torch.linalg.solve_triangular(
            eye + system, updates, upper=False, unitriangular=True
        )
    outputs = (q * kept) @ state + ((q @ k.mT) * between * seen) @ updates
    return outputs, Chunk(decays, updates)


def committed(
    state: torch.Tensor, path: torch.Tensor, k: torch.Tensor, chunk: Chunk
) -> torch.Tensor:
    """Return the state [H, K, V] after the rows ``path`` int64 [D], from the root down."""
    end = chunk.decays[:, path[-1], None]
    kept = k[:, path] * (end - chunk.decays[:, path]).exp()[..., None]
    return state * end[..., None].exp() + kept.mT @ chunk.updates[:, path]
