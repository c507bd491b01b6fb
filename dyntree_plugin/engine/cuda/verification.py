"""Verification on CUDA: all that follows the target's sampler in one graph.

The walk, the move of the accepted path's KV, what is learned and what is counted need nothing of
the host but where the requests' rows lie.
"""

from __future__ import annotations

from dataclasses import fields

import torch

from dyntree_kernels.walk import Walked
from dyntree_plugin.engine.cuda.graphs import Input, Record, RequestGraphs, Tensors, request_sizes
from dyntree_plugin.engine.step.requests import COLUMNS, PADDING
from dyntree_plugin.engine.step.verify import TreeVerifier, Verification


class GraphedTreeVerifier(TreeVerifier):
    """Replays graphs wherever the batch is not too large, unless a grammar forbids drafts or the
    rule reads the draws."""

    graphs: RequestGraphs | None = None
    _room: Walked

    def capture(self, record: Record, most: int) -> None:
        """Capture batches of up to ``most`` requests; the KV cache is there."""
        if self.trees.plan.reads_draws:
            return
        device, rows = self._buffers.device, self.trees.shape.node_budget + 1
        packed = torch.zeros(most, COLUMNS, dtype=torch.int64, device=device)
        sampled = torch.zeros(most * rows, dtype=torch.int64, device=device)
        inputs = [Input(packed, PADDING), Input(sampled, rows=rows)]
        # Results are copied to the host while graphs of drafting run, to which memory of this
        # graph's own could belong as well.
        self._room = self.room_for(most)
        self.graphs = RequestGraphs(self._captured, inputs, request_sizes(most))
        self.graphs.capture(record)

    def _captured(self, packed: torch.Tensor, sampled: torch.Tensor) -> Tensors:
        room = Walked(*(each[: len(packed)] for each in self._room))
        found, counted = self._walk_and_settle(packed, sampled, room=room)
        return *(getattr(found, field.name) for field in fields(found)), counted

    def _verify(
        self,
        packed: torch.Tensor,
        sampled: torch.Tensor,
        processed: torch.Tensor,
        invalid_drafts: torch.Tensor | None,
    ) -> tuple[Verification, torch.Tensor]:
        values = None
        if self.graphs is not None and invalid_drafts is None:
            with self._clock("walk"):
                values = self.graphs(packed, sampled)
        if values is None:
            return super()._verify(packed, sampled, processed, invalid_drafts)
        return Verification(*values[:-1]), values[-1]
