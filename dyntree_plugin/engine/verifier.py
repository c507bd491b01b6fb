"""Verification in the engine: vLLM's own sampler on every tree row, then the walk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from dyntree_plugin.engine.timing import StageClock
from dyntree_plugin.engine.trees import TreeStore
from dyntree_plugin.tree.verify.match import Accepted, match

MAX_CHUNK_BYTES = 1 << 30
"""The sampler copies logits to fp32; this bounds the copy, as vLLM bounds its own."""


@dataclass(frozen=True)
class Verification:
    """One verified batch of R requests.

    ``roots`` int64 [R]: batch row of every request's root. ``counts`` int64 [R]: nodes that were
    verified. ``emitted`` [R]: tokens that the request has got, 0 while its prompt is incomplete.
    """

    accepted: Accepted
    roots: torch.Tensor
    counts: torch.Tensor
    emitted: torch.Tensor


class TreeVerifier:
    """Stands in for the runner's rejection sampler, with its signature.

    ``on_verified`` is called with every Verification and its batch before the output is copied to
    the host.
    """

    def __init__(
        self,
        sampler: Sampler,
        trees: TreeStore,
        clock: StageClock,
        on_verified: Callable[[Verification, InputBatch], None],
    ) -> None:
        self.sampler = sampler
        self.trees = trees
        self._clock = clock
        self._on_verified = on_verified

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        wanted = self.sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        sampled, processed = self._sample(logits, input_batch, wanted is not None)
        with self._clock("walk"):
            accepted, first, counts = self._walk(sampled, input_batch, invalid_drafts)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            (accepted.lengths + 1).to(input_batch.seq_lens.dtype),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        logprobs = None
        if wanted is not None:
            scores = logits if processed is None else processed
            logprobs = self._logprobs(scores, input_batch, accepted, first, *wanted)
        roots = input_batch.logits_indices[first]
        self._on_verified(Verification(accepted, roots, counts, num_sampled), input_batch)
        return SamplerOutput(
            sampled_token_ids=accepted.tokens,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _sample(
        self, logits: torch.Tensor, batch: InputBatch, want_logprobs: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The target's token at every row, and the processed logits where logprobs need them."""
        positions = batch.positions[batch.logits_indices]
        input_ids = batch.input_ids[batch.logits_indices]
        bound = batch.seq_lens_cpu_upper_bound.numpy()
        keep = want_logprobs and self.sampler.logprobs_mode.startswith("processed")
        cu = batch.cu_num_logits_np
        limit = max(1, MAX_CHUNK_BYTES // (4 * logits.shape[1]))
        tokens, kept = [], []
        first = 0
        while first < batch.num_reqs:
            last = first + 1
            while last < batch.num_reqs and cu[last + 1] - cu[first] <= limit:
                last += 1
            rows = slice(int(cu[first]), int(cu[last]))
            sampled, processed = self.sampler.sample(
                logits[rows],
                batch.expanded_idx_mapping[rows],
                batch.idx_mapping[first:last],
                batch.idx_mapping_np[first:last],
                positions[rows],
                input_ids[rows],
                batch.expanded_local_pos[rows],
                bound[first:last],
                return_logprobs=want_logprobs,
            )
            tokens.append(sampled)
            if keep:
                kept.append(processed)
            first = last
        return torch.cat(tokens), torch.cat(kept) if keep else None

    def _walk(
        self, sampled: torch.Tensor, batch: InputBatch, invalid_drafts: torch.Tensor | None
    ) -> tuple[Accepted, torch.Tensor, torch.Tensor]:
        """Match the samples against the trees: (accepted, first logits row, nodes verified)."""
        trees, slots = self.trees, batch.idx_mapping
        bounds = batch.cu_num_logits.long()
        first = bounds[: batch.num_reqs]
        scheduled = bounds[1 : batch.num_reqs + 1] - first - 1
        # A tree that was proposed while the prompt was incomplete starts from a token that was
        # never sampled.
        prefill_len = self.sampler.req_states.prefill_len.gpu[slots]
        root_position = batch.positions[batch.logits_indices[first]]
        decoding = root_position >= prefill_len
        # The scheduler may cut a tree short; parents stand first, so what is left is a tree.
        counts = torch.where(decoding, torch.minimum(scheduled, trees.counts[slots]), 0)

        nodes = torch.arange(trees.shape.node_budget, device=sampled.device)
        valid = nodes < counts[:, None]
        rows = (first[:, None] + 1 + nodes).clamp(max=sampled.shape[0] - 1)
        if invalid_drafts is not None:
            valid &= ~invalid_drafts[rows]
        tokens = batch.input_ids[batch.logits_indices[rows]].long()
        root_and_nodes = torch.cat([first[:, None], rows], dim=1)
        accepted = match(
            tokens,
            trees.parents[slots],
            trees.depths[slots],
            trees.ancestors[slots],
            valid,
            sampled[root_and_nodes],
            trees.shape.max_depth,
        )
        return accepted, first, counts

    def _logprobs(
        self,
        scores: torch.Tensor,
        batch: InputBatch,
        accepted: Accepted,
        first: torch.Tensor,
        num_logprobs: int,
        num_token_ids: int,
    ) -> LogprobsTensors:
        """Logprobs of the emitted tokens: vLLM's code, on rows brought into path order."""
        num_rows = scores.shape[0]
        request = torch.arange(batch.num_reqs, device=scores.device)
        per_request = torch.diff(batch.cu_num_logits.long())
        request = torch.repeat_interleave(request, per_request, output_size=num_rows)
        step = (torch.arange(num_rows, device=scores.device) - first[request]).clamp(
            max=accepted.tokens.shape[1] - 1
        )
        on_path = torch.nn.functional.pad(accepted.path + 1, (1, 0)).clamp(min=0)
        rows = first[request] + on_path[request, step]
        return compute_topk_scores(
            scores[rows],
            num_logprobs,
            accepted.tokens[request, step],
            batch.cu_num_logits_np.tolist(),
            self.sampler.logprob_token_ids_state,
            batch.expanded_idx_mapping,
            num_token_ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )
