"""Check the walk in one launch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from paged_cases import DEVICE
from walk_checks import WalkChecks

from dyntree_kernels.cuda.walk import walk


class TestTheWalkInOneLaunch(WalkChecks):
    walk = staticmethod(walk)
    device = DEVICE
