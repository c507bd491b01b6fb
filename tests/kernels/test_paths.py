"""Check sampling parameters on paths on the CPU."""

from __future__ import annotations

from path_checks import PathChecks

from dyntree_kernels.cpu.paths import KERNELS


class TestParametersOnTheCPU(PathChecks):
    kernels = KERNELS
