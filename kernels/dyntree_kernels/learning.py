"""Interface of learning which nodes the target accepts, on every device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Regression(NamedTuple):
    """A logistic regression per class of requests and kind of candidates, for `Learn`.

    Regression ``class * kinds + kind`` is that of a class and a kind; kinds are those of ``prior``.
    ``weights`` float32 [classes * kinds, 3] and ``information`` float32 [classes * kinds, 3, 3] are
    updated. ``prior`` float32 [kinds, 3]: expected weights, with the precision ``strength``.
    ``low`` and ``high`` float32 [3]: bounds of the weights. ``memory``: number of observed nodes
    after which a node's influence falls to 1/e. If a request of a class has no observed node of a
    kind, it counts as one. ``steps``: steps of Newton's method.
    """

    weights: torch.Tensor
    information: torch.Tensor
    prior: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    strength: float
    memory: float
    steps: int


class Learn(Protocol):
    """Updates all regressions in one call, as `AcceptanceEstimate.observe` does."""

    def __call__(
        self,
        regression: Regression,
        features: torch.Tensor,
        kinds: torch.Tensor,
        parents: torch.Tensor,
        path: torch.Tensor,
        counts: torch.Tensor,
        slots: torch.Tensor,
        classes: torch.Tensor,
    ) -> None:
        """Learn which nodes the target accepted, among children of the root and of accepted nodes.

        Args:
            features: float32 [S, N, 2], of the nodes of all trees.
            kinds: int8 [S, N], of the nodes of all trees.
            parents: int64 [S, N], of the nodes of all trees.
            path: int64 [R, D] in dense rows, the accepted nodes; -1 after the last.
            counts: int64 [R], number of verified nodes, which are the first ones.
            slots: int64 [R], slots of the requests' trees; not read for a request without a class.
            classes: int64 [R], classes of the requests; -1 for none.

        Raises:
            ValueError: if another array is not dense.
        """
        ...


def check_learning(
    regression: Regression,
    features: torch.Tensor,
    kinds: torch.Tensor,
    parents: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Raise ValueError unless the arrays of `Learn` are dense."""
    learned = (regression.weights, regression.information)
    known = (regression.prior, regression.low, regression.high)
    of_trees = (features, kinds, parents, counts)
    dense = (each.is_contiguous() for each in (*of_trees, *learned, *known))
    if not all(dense) or path.stride(1) != 1:
        raise ValueError("the arrays of the trees and the regression must be dense")
