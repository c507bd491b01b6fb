"""Check compiled learning on the CPU."""

from __future__ import annotations

from learn_checks import LearnChecks

from dyntree_kernels.cpu.learn import learn


class TestCompiledLearning(LearnChecks):
    learn = staticmethod(learn)
    tolerance = 1e-3
