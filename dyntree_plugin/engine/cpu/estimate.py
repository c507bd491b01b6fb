"""What a verification teaches, in one compiled call."""

from __future__ import annotations

import torch

from dyntree_kernels.cpu.regression import newton_steps
from dyntree_plugin.tree.value import NEWTON_STEPS, AcceptanceEstimate


class CompiledEstimate(AcceptanceEstimate):
    """The same estimate; its observation takes thirty small tensor operations otherwise."""

    def observe(
        self,
        features: torch.Tensor,
        judged: torch.Tensor,
        taken: torch.Tensor,
        classes: torch.Tensor,
    ) -> None:
        """As `AcceptanceEstimate.observe`."""
        seen = (each.contiguous().numpy() for each in (features, judged, taken, classes))
        state = (self.prior, self._prior_information, self.low, self.high)
        newton_steps(
            *seen,
            self.memory,
            NEWTON_STEPS,
            *(each.numpy() for each in state),
            self.weights.numpy(),
            self.information.numpy(),
        )

    def warm_up(self) -> None:
        """Compile the observation by one that teaches nothing."""
        nothing = torch.zeros(1, 1, dtype=torch.bool)
        self.observe(torch.zeros(1, 1, 2), nothing, nothing, torch.full((1,), -1))
