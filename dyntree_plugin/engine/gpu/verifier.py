"""Verification on CUDA: sample-and-match, and what is counted of it, by one kernel."""

from __future__ import annotations

import torch

from dyntree_kernels.gpu.walk import BatchRows, walk
from dyntree_plugin.engine.batch import Requests
from dyntree_plugin.engine.gpu.verification import GraphedTreeVerifier
from dyntree_plugin.engine.verifier import Verification


class GPUTreeVerifier(GraphedTreeVerifier):
    """The tensors' verification, but for rule ``match`` where no grammar forbids drafts."""

    def _walk(
        self,
        requests: Requests,
        sampled: torch.Tensor,
        processed: torch.Tensor | None,
        invalid_drafts: torch.Tensor | None,
    ) -> tuple[Verification, torch.Tensor]:
        trees, buffers = self.trees, self._buffers
        if trees.plan.reads_draws or invalid_drafts is not None:
            return super()._walk(requests, sampled, processed, invalid_drafts)
        rows = (sampled, buffers.input_ids, buffers.positions, buffers.seq_lens)
        ranked = trees.plan.budget == "adaptive"
        batch = BatchRows(requests.packed, *rows)
        *found, counted = walk(batch, trees.arrays, trees.shape.max_depth, ranked=ranked)
        return Verification(*found), counted
