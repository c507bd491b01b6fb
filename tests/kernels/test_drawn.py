"""Check the compiled traversal of drawn trees on the CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="the columns of requests belong to the engine")

from drawn_checks import DrawnChecks

from dyntree_kernels.cpu.drawn import decide_trees


class TestTheCompiledTraversal(DrawnChecks):
    decide = staticmethod(decide_trees)
