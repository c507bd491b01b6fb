"""Drafting on the CPU."""

from __future__ import annotations

from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_plugin.engine.compiled_growth import CompiledTreeSpeculator


class CPUTreeSpeculator(CompiledTreeSpeculator):
    growth_type = CompiledGrowth
