"""Check the compiled walk on the CPU."""

from __future__ import annotations

from walk_checks import WalkChecks

from dyntree_kernels.cpu.walk import walk


class TestTheCompiledWalk(WalkChecks):
    walk = staticmethod(walk)
