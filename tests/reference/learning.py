"""What kernels learn of each verification, in plain torch."""

from __future__ import annotations

import torch

from dyntree_kernels.contracts import KINDS
from dyntree_plugin.tree.value import CLASSES, NEWTON_STEPS, AcceptanceEstimate


def outcomes(
    parents: torch.Tensor, path: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which nodes the target has judged, and which of them it took: two bool [R, N].

    A node is judged if its parent is the root or accepted. ``parents`` are int64 [R, N], ``path``
    int64 [R, D] is that of `Accepted`, and ``valid`` bool [R, N] marks nodes that were verified.
    """
    rows, nodes = parents.shape
    taken = torch.zeros(rows, nodes + 1, dtype=torch.bool, device=parents.device)
    taken.scatter_(1, path.masked_fill(path < 0, nodes), True)
    taken = taken[:, :nodes]
    judged = valid & ((parents < 0) | taken.gather(1, parents.clamp(min=0)))
    return judged, taken


class LearningEstimate(AcceptanceEstimate):
    """An estimate that learns by Newton steps in plain torch."""

    def observe(
        self,
        features: torch.Tensor,
        kinds: torch.Tensor | int,
        judged: torch.Tensor,
        taken: torch.Tensor,
        classes: torch.Tensor,
    ) -> None:
        """Learn from one verification.

        ``features`` float32 [R, N, FEATURES] are the nodes' when they were proposed. ``kinds`` are
        one kind or an integer tensor [R, N]. ``judged`` and ``taken`` bool [R, N] come from
        `outcomes`. ``classes`` are int64 [R], -1 for a request that teaches nothing.
        """
        for kind in range(KINDS):
            self._observe(kind, features, judged & (kinds == kind), taken, classes)

    def _observe(
        self,
        kind: int,
        features: torch.Tensor,
        judged: torch.Tensor,
        taken: torch.Tensor,
        classes: torch.Tensor,
    ) -> None:
        """Learn from the ``judged`` nodes, which are of one kind."""
        known, precision = self.weights[kind::KINDS], self.information[kind::KINDS]
        prior = self.prior[kind]
        x = torch.nn.functional.pad(features, (1, 0), value=1.0)
        x = torch.where(judged[:, :, None], x, 0.0)
        of_class = (classes == torch.arange(CLASSES)[:, None].to(classes.device)).float()
        # A request without judged nodes of the kind counts for one. Otherwise an estimate so low
        # that trees have no such nodes would never fade, since there is nothing to learn from.
        seen = of_class @ judged.sum(dim=1).clamp(min=1).float()
        kept = torch.exp(-seen / self.memory)[:, None]
        remembered = kept[:, :, None] * precision
        reverting = (1 - kept[:, :, None]) * self._prior_information

        weights = known
        for _ in range(NEWTON_STEPS):
            chance = torch.sigmoid((x * weights[classes][:, None]).sum(dim=-1))
            surprise = (taken.float() - chance)[:, :, None] * x
            curvature = (chance * (1 - chance))[:, :, None] * x
            gradient = (
                of_class @ surprise.sum(dim=1)
                + _times(remembered, known - weights)
                + _times(reverting, prior - weights)
            )
            learned = of_class @ (curvature.transpose(1, 2) @ x).flatten(1)
            information = remembered + reverting + learned.view_as(remembered)
            step = _solve(information, gradient)
            weights = (weights + step).clamp(self.low, self.high)
        sound = weights.isfinite().all(dim=1) & information.isfinite().flatten(1).all(dim=1)
        known.copy_(torch.where(sound[:, None], weights, prior))
        precision.copy_(torch.where(sound[:, None, None], information, self._prior_information))


def _solve(matrices: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Solve A x = v for symmetric A [C, 3, 3] and v [C, 3], by Cramer's rule.

    Libraries' solvers load one more library on CUDA and cannot be captured in a graph. It computes
    in double precision, since the rule loses the square of the condition number.
    """
    rows = matrices.double()
    cofactors = torch.linalg.cross(rows.roll(-1, 1), rows.roll(-2, 1))
    determinant = (rows[:, 0] * cofactors[:, 0]).sum(dim=1, keepdim=True)
    solution: torch.Tensor = (cofactors * vectors[:, :, None]).sum(dim=1) / determinant
    return solution.to(vectors.dtype)


def _times(matrices: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Multiply each of ``matrices`` [C, F, F] by its vector [C, F]."""
    return (matrices @ vectors[:, :, None])[:, :, 0]
