"""The target's sampling parameters on a draft's logits, so that growth ranks what can be drawn.

A node that the request's parameters exclude is never accepted. Verification does not read the
draft's logits, so output does not depend on this.
"""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.states import SamplingStates

from dyntree_kernels.paths import Paths
from dyntree_plugin.engine.fallback import MAX_CHUNK_BYTES
from dyntree_plugin.engine.sampling.parameters import ParameterRows, TreeParameters
from dyntree_plugin.engine.step.growth_stages import Rank
from dyntree_plugin.tree.padded import of_width
from dyntree_plugin.tree.truncation import Truncation, truncate


class TargetRanking:
    """What the target's sampler does to logits before it draws, for the rows of a draft.

    It ends before the temperature, which growth applies. Top-k, top-p and min-p mask the same
    tokens as after temperature.
    """

    def __init__(
        self,
        parameters: TreeParameters,
        states: SamplingStates,
        total_len: torch.Tensor,
        vocabulary: int,
        rows: int,
    ) -> None:
        """``total_len`` int32 [slots]: tokens of each request's text, with the root of its next
        tree. ``vocabulary``: entries of the target's logits, which the parameters' arrays have.
        ``rows``: the most of a request in one forward of the draft; 0 if memory has no bound."""
        self._parameters = parameters
        self._states = states
        self._total_len = total_len
        self._vocabulary = vocabulary
        # Ranking holds up to three copies of a forward's logits, which no memory profile counts.
        copies = 3 * 4 * vocabulary * rows
        self._most_requests = MAX_CHUNK_BYTES // copies if copies else sys.maxsize

    def of(self, packed: torch.Tensor) -> Rank | None:
        """Return what the ``packed`` requests on the host need; None if they need nothing, or are
        so many that it would take too much memory."""
        if len(packed) > self._most_requests:
            return None
        on_host = packed[:, 0].numpy()  # sync: host memory
        processed, truncated = self._parameters.needed(on_host), self._truncates(on_host)
        if not (processed or truncated):
            return None
        return partial(self._rank, on_host, processed, truncated)

    def _rank(
        self,
        on_host: np.ndarray,
        processed: bool,
        truncated: bool,
        logits: torch.Tensor,
        index: torch.Tensor,
        paths: Paths,
    ) -> torch.Tensor:
        """Return what growth should rank, float32 [R * W, V], of the `Rank`'s arguments.

        ``on_host`` [R]: the slots. ``truncated``: whether top-k, top-p or min-p cut any request's
        distribution. ``processed``: whether any has other parameters that change logits.
        """
        slots = index.repeat_interleave(len(logits) // max(1, len(index)))
        found = self._of_vocabulary(logits)
        if processed:
            positions = self._total_len[slots].long() - 1 + paths.lengths
            rows = ParameterRows(slots, index.contiguous(), on_host, positions, paths)
            found = self._parameters.apply(found, rows)
        if truncated:
            states = self._states
            of_rows = (states.temperature, states.top_k, states.top_p, states.min_p)
            found = truncate(found, Truncation(*(each.gpu[slots] for each in of_rows)))
        return found

    def _truncates(self, slots: np.ndarray) -> bool:
        """Return whether top-k, top-p or min-p cut any request's distribution."""
        states = self._states
        drawn = slots[states.temperature.np[slots] > 0]
        if not drawn.size:
            return False
        cut = states.top_k.np[drawn] < states.vocab_size
        cut |= (states.top_p.np[drawn] < 1) | (states.min_p.np[drawn] > 0)
        return bool(cut.any())

    def _of_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy logits to float32 over the target's vocabulary, which models may pad differently."""
        return of_width(logits, self._vocabulary).to(torch.float32, copy=True)
