"""Stage 3, verify: sample the target at every row, accept a path per tree, make it permanent.

The calibration learns from the paths later, so that the output does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from dyntree_kernels.contracts import BatchRows, Walked, allocate
from dyntree_plugin.engine.fallback import MAX_CHUNK_BYTES
from dyntree_plugin.engine.layer_kinds import AcceptedPaths, Keeper
from dyntree_plugin.engine.step.ops import Graphs, TreeOps
from dyntree_plugin.engine.step.records import Learning
from dyntree_plugin.engine.step.requests import COLUMNS, PADDING, Requests
from dyntree_plugin.engine.step.sampled_walk import TreeWalk
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.value import AcceptanceEstimate


class TreeVerifier:
    """Verifies the trees of a batch with vLLM's sampler."""

    def __init__(
        self,
        sampler: Sampler,
        trees: TreeStore,
        estimate: AcceptanceEstimate,
        ops: TreeOps,
        graphs: Graphs,
        *,
        walk: TreeWalk,
        buffers: InputBuffers,
        keepers: Callable[[], Sequence[Keeper]],
        copies: int = 1,
    ) -> None:
        """``buffers``: those that every batch is a part of. ``keepers``: make accepted paths
        permanent in the target's layers. ``copies``: how often the sampler copies a row of logits
        at most."""
        self.sampler = sampler
        self.trees = trees
        self.buffers = buffers
        self._estimate = estimate
        self._keepers = keepers
        self._ops = ops
        self._graphs = graphs
        self.copies = copies
        self._walk = walk

    def run(
        self,
        packed: torch.Tensor,
        logits: torch.Tensor,
        batch: InputBatch,
        invalid_drafts: torch.Tensor | None,
    ) -> tuple[SamplerOutput, Walked, Learning | None]:
        """Verify the ``packed`` requests by the target's ``logits`` of their rows.

        ``invalid_drafts`` bool [rows]: nodes that a grammar forbids; None where there is none. The
        last value is what learns from the result, as in `verify`.
        """
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        wanted = self.sampler.get_logprobs_dims(batch.idx_mapping_np)
        sampled, processed = self._sample(logits, batch, wanted is not None)
        self._ops.clock.next("verify")
        walked, learning = self.verify(packed, sampled, processed, invalid_drafts)
        logprobs = None
        if wanted is not None:
            self._ops.clock.next("sample")
            scores = processed if self._of_processed else logits
            logprobs = self._logprobs(scores, batch, walked, *wanted)
        output = SamplerOutput(
            sampled_token_ids=walked.tokens,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=walked.emitted,
            num_rejected=walked.rejected,
        )
        return output, walked, learning

    def verify(
        self,
        packed: torch.Tensor,
        sampled: torch.Tensor,
        processed: torch.Tensor,
        invalid_drafts: torch.Tensor | None,
    ) -> tuple[Walked, Learning | None]:
        """Walk and move, from a graph or eagerly; also return what learns, None if nothing does.

        Learning must come before the next verification, and before the next trees are stored.
        """
        if invalid_drafts is None and not self.reads_logits:
            replayed = self._graphs.verification(packed, sampled)
            if replayed is not None:
                return replayed
        requests = Requests(packed.to(sampled.device, non_blocking=True), self.trees.spare)
        walked = self.allocate(len(packed))
        walked = self.walk(requests, sampled, invalid_drafts, walked, processed)
        self.keep(requests, walked)
        return walked, partial(self.learn, requests, walked) if self.learns else None

    def walk(
        self,
        requests: Requests,
        sampled: torch.Tensor,
        invalid_drafts: torch.Tensor | None,
        room: Walked,
        processed: torch.Tensor,
    ) -> Walked:
        """Accept a path of each tree, by what the target ``sampled`` at every row.

        ``processed`` and ``room``: as in `TreeWalk`.
        """
        buffers = self.buffers
        arrays = (sampled, buffers.input_ids, buffers.positions, buffers.seq_lens, invalid_drafts)
        return self._walk(requests, BatchRows(requests.packed, *arrays), processed, room)

    @property
    def reads_logits(self) -> bool:
        """Whether the walk reads the sampler's processed logits, so that it has no graph."""
        return self._walk.reads_logits

    @property
    def keeps_logits(self) -> bool:
        """Whether steps may keep the sampler's processed logits of all rows."""
        return self.reads_logits or self._of_processed

    @property
    def _of_processed(self) -> bool:
        """Whether logprobs are those of the sampler's processed logits."""
        return self.sampler.logprobs_mode.startswith("processed")

    def rehearse(self) -> None:
        """Walk a batch of padding with nodes that a grammar may forbid, and with chains where there
        are any; it changes nothing.

        vLLM's warm-up never runs structured output with drafts.
        """
        trees = self.trees
        device, rows = self.buffers.device, trees.shape.node_budget + 1
        nobody = torch.full((1, COLUMNS), PADDING, device=device)
        sampled = torch.zeros(rows, dtype=torch.int64, device=device)
        processed = torch.zeros(rows, trees.vocabulary if self.reads_logits else 0, device=device)
        requests = Requests(nobody, trees.spare)
        self.walk(requests, sampled, sampled.bool(), self.allocate(1), processed)

    def keep(self, requests: Requests, walked: Walked) -> None:
        """Make the accepted paths permanent."""
        accepted = AcceptedPaths(walked.path, walked.roots, requests.index)
        for places, keep in self._keepers():
            keep(accepted, places)

    @property
    def learns(self) -> bool:
        """Whether anything is learned from what was accepted."""
        return self.trees.plan.calibrated

    def learn(self, requests: Requests, walked: Walked) -> None:
        """Learn from what was accepted how likely nodes are."""
        self._ops.learn(
            self._estimate.regression,
            self.trees.features,
            self.trees.kinds,
            self.trees.parents,
            walked.path,
            walked.counts,
            requests.index,
            requests.classes,
        )

    def allocate(self, requests: int) -> Walked:
        """Allocate the result for so many requests."""
        shape, device = self.trees.shape, self.buffers.device
        return allocate(requests, shape.node_budget, shape.max_depth, device, ranked=self._ranked)

    @property
    def _ranked(self) -> bool:
        return self.trees.plan.budget == "adaptive"

    def _sample(
        self, logits: torch.Tensor, batch: InputBatch, want_logprobs: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's token at every row, and the processed logits where something reads them."""
        # Where no request is in its prompt every row has logits.
        every = logits.shape[0] == batch.num_tokens
        at = slice(batch.num_tokens) if every else batch.logits_indices
        positions, input_ids = batch.positions[at], batch.input_ids[at]
        bound = batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs]
        keep = self.reads_logits or (want_logprobs and self.keeps_logits)
        limit = max(1, MAX_CHUNK_BYTES // (4 * self.copies * logits.shape[1]))
        tokens, kept = [], []
        for requests, rows in _chunks(batch.cu_num_logits_np[: batch.num_reqs + 1], limit):
            sampled, processed = self.sampler.sample(
                _part(logits, rows),
                _part(batch.expanded_idx_mapping, rows),
                _part(batch.idx_mapping, requests),
                batch.idx_mapping_np[requests],
                _part(positions, rows),
                _part(input_ids, rows),
                _part(batch.expanded_local_pos, rows),
                bound[requests],
                return_logprobs=want_logprobs,
            )
            tokens.append(sampled)
            if keep:
                kept.append(processed)
        whole = tokens[0] if len(tokens) == 1 else torch.cat(tokens)
        return whole, torch.cat(kept) if keep else logits[:0]

    def _logprobs(
        self,
        scores: torch.Tensor,
        batch: InputBatch,
        walked: Walked,
        num_logprobs: int,
        num_token_ids: int,
    ) -> LogprobsTensors:
        """Logprobs of the emitted tokens: vLLM's code, on rows brought into path order."""
        num_rows = scores.shape[0]
        request = torch.arange(batch.num_reqs, device=scores.device)
        bounds = batch.cu_num_logits.long()
        first, per_request = bounds[:-1], torch.diff(bounds)
        request = torch.repeat_interleave(request, per_request, output_size=num_rows)
        step = (torch.arange(num_rows, device=scores.device) - first[request]).clamp(
            max=walked.tokens.shape[1] - 1
        )
        on_path = torch.nn.functional.pad(walked.path + 1, (1, 0)).clamp(min=0)
        rows, tokens = first[request] + on_path[request, step], walked.tokens[request, step]
        limit = max(1, MAX_CHUNK_BYTES // (4 * scores.shape[1]))
        parts = [
            compute_topk_scores(
                scores[rows[span]],
                num_logprobs,
                tokens[span],
                None,
                self.sampler.logprob_token_ids_state,
                batch.expanded_idx_mapping[span],
                num_token_ids,
                logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
            )
            for span in (slice(at, at + limit) for at in range(0, num_rows, limit))
        ]
        return LogprobsTensors.cat(parts, batch.cu_num_logits_np.tolist())  # sync: host memory


WHOLE = slice(None)


def _chunks(bounds: np.ndarray, limit: int) -> Iterator[tuple[slice, slice]]:
    """Yield spans of requests, and of their rows: of ``limit`` rows at most, or of one request.

    ``bounds`` [R + 1]: the requests' rows, from 0.
    """
    if bounds[-1] <= limit:
        yield WHOLE, WHOLE
        return
    first = 0
    while first < len(bounds) - 1:
        fit = int(np.searchsorted(bounds, bounds[first] + limit, side="right")) - 1
        last = max(first + 1, fit)
        yield slice(first, last), slice(int(bounds[first]), int(bounds[last]))
        first = last


def _part(whole: torch.Tensor, span: slice) -> torch.Tensor:
    """Return a part of a tensor. A slice takes the host microseconds, and most parts are all."""
    return whole if span is WHOLE else whole[span]
