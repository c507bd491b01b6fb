"""Best-first growth with a bounded number of draft forwards: the serving default.

Every draft forward expands the ``width`` most valuable nodes of every request that have not
been expanded yet; when the forwards are spent, the ``node_budget`` most valuable candidates are
the tree. A node's value is the product of its path's edge probabilities, as in DySpec
(arXiv 2410.11744, section 4) and OPT-Tree (arXiv 2406.17276). Children are the draft's best
tokens, so only rules fit that do not reason about draws: sample-and-match, or a greedy target.
"""

from __future__ import annotations

from functools import partial

import torch

from dyntree_plugin.tree.growth.base import Draft, GrowthConfig, GrowthPlan, Path, Slot
from dyntree_plugin.tree.growth.best_first import BestFirstGrowth
from dyntree_plugin.tree.shape import TreeShape


class TopKGrowth(BestFirstGrowth):
    """One step's growth over R requests; see `Growth`."""

    def __init__(
        self, num_requests: int, shape: TreeShape, columns: torch.Tensor, least: float = 0.0
    ) -> None:
        """``columns`` int64 [R]: how many scratch columns each request has room for; ``least``: the
        least value of a node."""
        super().__init__(
            num_requests,
            columns,
            node_budget=shape.node_budget,
            children=shape.children,
            widths=shape.widths,
            least=least,
        )


def plan(config: GrowthConfig, shape: TreeShape) -> GrowthPlan:
    sampling = config.pick_sampling("best")
    start = partial(_start, shape, config.min_value or 0.0)
    return GrowthPlan(sampling, shape.children, shape.widths, start)


def _start(shape: TreeShape, least: float, num_requests: int, columns: torch.Tensor) -> TopKGrowth:
    return TopKGrowth(num_requests, shape, columns, least)


def reference(draft: Draft, shape: TreeShape, room: int, least: float = 0.0) -> list[Slot]:
    """The same by the book: a dictionary of candidates, and one expansion after another.

    ``room``: scratch columns of the request. Nodes from the most valuable down.
    """
    values: dict[Path, float] = {}
    opened: set[Path] = set()

    def expand(path: Path, value: float) -> None:
        probabilities = draft(path)
        tokens = sorted(range(len(probabilities)), key=lambda y: -probabilities[y])
        for token in tokens[: shape.children]:
            values[(*path, token)] = value * probabilities[token]

    expand((), 1.0)
    for forward in range(shape.max_depth - 1):
        closed = [path for path in values if path not in opened]
        chosen = sorted(closed, key=lambda path: -values[path])[: shape.width]
        for column, path in enumerate(chosen, start=forward * shape.width):
            opened.add(path)
            if column < room:
                expand(path, values[path])
    best = sorted(values, key=lambda path: -values[path])
    best = [path for rank, path in enumerate(best) if rank == 0 or values[path] >= least]
    return [Slot(path, values[path], values[path]) for path in best[: shape.node_budget]]
