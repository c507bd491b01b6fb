"""Check the correction of logits in a few launches, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from paged_cases import DEVICE
from residual_checks import ResidualChecks

from dyntree_kernels.cuda.residuals import DeviceResiduals


class TestResidualsInAFewLaunches(ResidualChecks):
    kernels = DeviceResiduals
    device = DEVICE
    rounds = 5
