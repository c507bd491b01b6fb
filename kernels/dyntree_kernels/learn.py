"""What the acceptance estimate's logistic regressions learn from, on every device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Regression(NamedTuple):
    """``weights`` float32 [classes, 3] and ``information`` [classes, 3, 3], which are changed.
    ``prior``, ``low``, ``high`` float32 [3]: what is known before of the weights, as sure as
    ``strength``, and their bounds. ``memory``: judged nodes after which one counts for 1/e.
    ``steps``: of Newton's method."""

    weights: torch.Tensor
    information: torch.Tensor
    prior: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    strength: float
    memory: float
    steps: int


class Learn(Protocol):
    """Newton steps of the regressions in one call, as `AcceptanceEstimate.observe` has them."""

    def __call__(
        self,
        regression: Regression,
        features: torch.Tensor,
        parents: torch.Tensor,
        path: torch.Tensor,
        counts: torch.Tensor,
        slots: torch.Tensor,
        classes: torch.Tensor,
    ) -> None:
        """Learn which nodes the target took, of those whose parent is the root or was taken.

        Args:
            features: float32 [S, N, 2], and parents: int64 [S, N], the trees.
            path: int64 [R, D] of dense rows, the nodes that were taken, -1 after the last.
            counts: int64 [R], nodes that were verified, the first ones.
            slots: int64 [R], where the requests' trees are; not read where there is no class.
            classes: int64 [R], a request's class; -1 for none.

        Raises:
            ValueError: for other arrays that are not dense.
        """
        ...


def check_dense(
    regression: Regression,
    features: torch.Tensor,
    parents: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    dense = (array.is_contiguous() for array in (features, parents, counts, *regression[:5]))
    if not all(dense) or path.stride(1) != 1:
        raise ValueError("the arrays of the trees and the regression must be dense")
