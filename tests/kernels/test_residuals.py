"""Check the compiled correction of logits on the CPU."""

from __future__ import annotations

from residual_checks import ResidualChecks

from dyntree_kernels.cpu.residuals import CompiledResiduals


class TestCompiledResiduals(ResidualChecks):
    kernels = CompiledResiduals
