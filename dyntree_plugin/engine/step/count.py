"""Stage 6, count: what the device reports of a step's trees."""

from __future__ import annotations

import torch

from dyntree_kernels.contracts import AT_DEPTH, KINDS, Walked
from dyntree_plugin.engine.step.trees import TreeStore


def report(trees: TreeStore, slots: torch.Tensor, walked: Walked | None = None) -> torch.Tensor:
    """Count the trees of R requests at ``slots`` int64 [R], in the columns of `Report`.

    Counts are exact in float64. Without a walk the columns of verification are 0: the trees waited
    for the step, and the scheduler had no room for them.
    """
    levels = trees.shape.max_depth
    grown = torch.stack((trees.grown[slots], trees.admitted[slots]), dim=1).double()
    if walked is None:
        verified = grown.new_zeros(len(slots), AT_DEPTH - 2 + 3 * levels)
    else:
        verified = _verified(trees, slots, walked)
    columns = [grown, verified]
    if trees.plan.budget == "adaptive":
        columns += [trees.values[slots].double().exp(), trees.forwards[slots].double()]
    return torch.cat(columns, dim=1)


def _verified(trees: TreeStore, slots: torch.Tensor, walked: Walked) -> torch.Tensor:
    counts, path = walked.counts, walked.path
    nodes = torch.arange(trees.shape.node_budget, device=counts.device)
    real = nodes < counts[:, None]
    depths = torch.where(real, trees.depths[slots], 0)
    places = torch.arange(path.shape[1], device=path.device)
    moved = ((path >= 0) & (path != places)).sum(dim=1)
    chances = torch.where(real, trees.values[slots].double().exp(), 0.0)
    each = torch.stack((real.double(), chances), dim=1)
    kinds = trees.kinds[slots].long()
    of_kind = _sums(each, kinds, KINDS)
    accepted = torch.where(path >= 0, kinds.gather(1, path.clamp(min=0)), -1).double()
    # Padding has depth 0.
    by_depth = _sums(each, depths, path.shape[1] + 1)[:, :, 1:]
    numbers = torch.stack((counts, depths.amax(dim=1), moved), dim=1)
    groups = [group.flatten(1) for group in (of_kind, by_depth, accepted)]
    return torch.cat((numbers.double(), *groups), dim=1)


def _sums(each: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """Return the sums of ``each`` [R, G, N] by ``index`` int64 [R, N], [R, G, size]."""
    sums = each.new_zeros(*each.shape[:2], size)
    return sums.scatter_add_(2, index[:, None].expand_as(each), each)
