"""Positions and masks of batches in which every row is of a tree, as graphs."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.input_batch import InputBuffers

from dyntree_kernels.cuda.place import place_packed
from dyntree_plugin.engine.attention.buffers import MaskBuffers
from dyntree_plugin.engine.cuda.graphs import Input, RequestGraphs, Tensors
from dyntree_plugin.engine.step.trees import PlacedTrees


class CapturedPlacing(RequestGraphs):
    """Replays what gives the rows of trees their positions and masks."""

    def __init__(
        self,
        packed: Input,
        sizes: tuple[int, ...],
        buffers: InputBuffers,
        trees: PlacedTrees,
        masks: MaskBuffers,
    ) -> None:
        """``packed``: as `Packer` describes requests. ``buffers``: those that every batch is a part
        of. ``masks``: where attention reads the result."""
        super().__init__(self._run, [packed], sizes)
        self._buffers = buffers
        self._trees = trees
        self._masks = masks

    def room(self, requests: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the mask of a batch lies."""
        return self._masks.room(requests, rows)

    def _run(self, packed: torch.Tensor) -> Tensors:
        requests, (buffers, trees) = len(packed), (self._buffers, self._trees)
        place_packed(
            buffers.positions,
            packed,
            buffers.seq_lens[:requests],
            trees.depths,
            trees.ancestors,
            self._masks.room(requests, self._masks.rows),
        )
        return ()
