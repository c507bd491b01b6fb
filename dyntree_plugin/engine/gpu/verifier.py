"""Verification on CUDA: sample-and-match by one kernel."""

from __future__ import annotations

import torch

from dyntree_kernels.gpu.walk import walk
from dyntree_plugin.engine.batch import Requests
from dyntree_plugin.engine.gpu.verification import GraphedTreeVerifier
from dyntree_plugin.engine.verifier import TreeRows
from dyntree_plugin.tree.verify.match import Accepted


class GPUTreeVerifier(GraphedTreeVerifier):
    def _match(self, rows: TreeRows, sampled: torch.Tensor, requests: Requests) -> Accepted:
        path, lengths, emitted = walk(
            rows.tokens,
            self.trees.parents[requests.slots],
            rows.valid,
            sampled[rows.root_and_nodes].long(),
            self.trees.shape.max_depth,
        )
        # Behind the emitted tokens stands -1, and the draft's padding rows read it as a token.
        return Accepted(path, lengths, emitted.clamp_(min=0))
