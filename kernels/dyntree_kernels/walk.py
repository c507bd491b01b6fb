"""What sample-and-match over a batch of stored trees reads and gives, on every device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from dyntree_kernels.growth import TreeArrays


class BatchRows(NamedTuple):
    """A batch of R requests, T rows and L rows of logits.

    ``requests`` int64 [R, at least 5], dense rows: where a request's tree is stored, row of its
    root among those of logits, rows of nodes behind it, row of the root among all, tokens of its
    prompt; -1 throughout in what only fills the batch up. ``sampled`` int64 [L]: the target's
    draws. ``ids`` int32 and ``positions`` int64 [T]. ``seq_lens`` int32 [R]. ``forbidden`` bool
    [L]: of nodes, whether a grammar forbids them; None where there is none.
    """

    requests: torch.Tensor
    sampled: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    forbidden: torch.Tensor | None = None


class Walked(NamedTuple):
    """What a walk over R requests and trees of at most D levels gives.

    ``path`` int64 [R, D]: accepted nodes from the root down, -1 after the last. ``tokens`` int64
    [R, D + 1]: the target's along the path, then the one at the root. ``roots`` int64 [R]: their
    rows among all, and ``positions``. ``counts`` int64 [R]: nodes that were verified. ``emitted``
    int32 [R]: tokens that the request has got, 0 while its prompt is incomplete, and ``rejected``
    the rest of its rows, 0 while it is.

    ``report`` float64 [R, C], what is counted: nodes that were grown, and admitted; the chance of
    every node and its depth, N columns each, if they are asked for; nodes that were verified, the
    depth of the deepest, accepted nodes that change place, ``emitted``; nodes that were verified at
    depth 1 to D; the sum of their chances at depth 1 to D.
    """

    path: torch.Tensor
    tokens: torch.Tensor
    roots: torch.Tensor
    positions: torch.Tensor
    counts: torch.Tensor
    emitted: torch.Tensor
    rejected: torch.Tensor
    report: torch.Tensor


def room_for(
    requests: int, nodes: int, max_depth: int, device: torch.device, *, ranked: bool
) -> Walked:
    """Memory for what a walk gives of trees of N ``nodes`` and ``max_depth`` levels at most; with
    room for the chance and depth of every node if they are to be ``ranked``."""

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(requests, *shape, dtype=dtype, device=device)

    columns = 6 + 2 * max_depth + (2 * nodes if ranked else 0)
    return Walked(
        empty(max_depth), empty(max_depth + 1), empty(), empty(), empty(),
        empty(dtype=torch.int32), empty(dtype=torch.int32), empty(columns, dtype=torch.float64),
    )  # fmt: skip


class Walk(Protocol):
    """Accepts the paths that the target's samples follow, for all requests in one call.

    `tree/match.py` is the rule in plain torch, for any tree.
    """

    def __call__(self, batch: BatchRows, trees: TreeArrays, found: Walked, *, ranked: bool) -> None:
        """Fill ``found``, which `room_for` has made; ``ranked`` as there.

        Children of one node carry different tokens.

        Raises:
            ValueError: for arrays that are not dense.
        """
        ...


def check_dense(batch: BatchRows, trees: TreeArrays, found: Walked) -> None:
    arrays = [array for array in (*batch[1:], *trees[:6], *found) if array is not None]
    if not all(array.is_contiguous() for array in arrays) or batch.requests.stride(1) != 1:
        raise ValueError("the arrays of a batch, its trees and the results must be dense")
