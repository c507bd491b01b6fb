"""Check sampling parameters on paths on the CPU."""

from __future__ import annotations

from vllm_cpu_runner import install

install()  # must run before the sampler's modules are imported

from path_checks import PathChecks  # noqa: E402

from dyntree_kernels.cpu.paths import KERNELS  # noqa: E402


class TestParametersOnTheCPU(PathChecks):
    kernels = KERNELS
