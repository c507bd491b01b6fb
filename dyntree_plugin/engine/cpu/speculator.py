"""Drafting on the CPU."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_plugin.engine.step.compiled_growth import CompiledTreeSpeculator


class CPUTreeSpeculator(CompiledTreeSpeculator):
    growth_type = CompiledGrowth

    def _most_emitted(self, batch: InputBatch, emitted: torch.Tensor) -> int:
        return min(super()._most_emitted(batch, emitted), max(1, int(emitted.max())))
