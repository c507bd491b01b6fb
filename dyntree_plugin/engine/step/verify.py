"""Verification in the engine: vLLM's own sampler on every tree row, then the walk.

Under the rules that read draws the walk takes the sampler's processed logits, and noise of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from dyntree_kernels.walk import BatchRows, Walk, Walked, room_for
from dyntree_plugin.engine.step.clock import Clock
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.engine.telemetry.stats import report
from dyntree_plugin.tree.children import Perturb
from dyntree_plugin.tree.match import Accepted
from dyntree_plugin.tree.noise import ACCEPT, BONUS, stream, uniform
from dyntree_plugin.tree.papers.rules import DRAWN_RULES

MAX_CHUNK_BYTES = 1 << 30
"""The sampler copies logits to fp32; this bounds the copy, as vLLM bounds its own."""


@dataclass(frozen=True)
class Verification:
    """One verified batch of R requests, by any rule; its fields are those of `Walked`."""

    path: torch.Tensor
    tokens: torch.Tensor
    roots: torch.Tensor
    positions: torch.Tensor
    counts: torch.Tensor
    emitted: torch.Tensor
    rejected: torch.Tensor


Settle = Callable[[Verification, Requests], None]
"""Does on the device what follows from a verification."""


@dataclass(frozen=True)
class LogitRows:
    """Where the trees of R requests lie among the rows of logits.

    ``roots`` int64 [R], ``nodes`` int64 [R, N]: rows. ``positions`` int64 [R] of the roots.
    ``tokens`` int64 [R, N] of the nodes. ``room`` int64 [R]: nodes that vLLM scheduled, whatever
    the tree holds. ``counts`` int64 [R]: nodes that are verified, the first ones.
    """

    roots: torch.Tensor
    nodes: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor
    room: torch.Tensor
    counts: torch.Tensor

    @property
    def root_and_nodes(self) -> torch.Tensor:
        """Rows int64 [R, N + 1]."""
        return torch.cat([self.roots[:, None], self.nodes], dim=1)


class TreeVerifier:
    """Stands in for the runner's rejection sampler, with its signature."""

    # vLLM's rehearsal of its kernels asks for it.
    enable_adaptive_verification = False

    def __init__(
        self,
        sampler: Sampler,
        trees: TreeStore,
        walk: Walk,
        perturb: Perturb,
        clock: Clock,
        buffers: InputBuffers,
        pack: Callable[[InputBatch], torch.Tensor],
        settle: Settle,
        on_verified: Callable[[Verification, torch.Tensor, InputBatch], None],
    ) -> None:
        """``buffers``: those that every batch is a part of. ``pack`` as in `batch`, with the
        sampler's states. ``on_verified`` is called with every Verification, what `report` makes of
        it, and its batch, before the output is copied to the host."""
        self.sampler = sampler
        self.trees = trees
        self._sample_and_match = walk
        self._perturb = perturb
        self._clock = clock
        self._buffers = buffers
        self._pack = pack
        self._settle = settle
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
        packed = self._pack(input_batch)
        found, counted = self._verify(packed, sampled, processed, invalid_drafts)
        logprobs = None
        if wanted is not None:
            of_processed = self.sampler.logprobs_mode.startswith("processed")
            scores = processed if of_processed else logits
            logprobs = self._logprobs(scores, input_batch, found, *wanted)
        self._on_verified(found, counted, input_batch)
        return SamplerOutput(
            sampled_token_ids=found.tokens,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=found.emitted,
            num_rejected=found.rejected,
        )

    def _verify(
        self,
        packed: torch.Tensor,
        sampled: torch.Tensor,
        processed: torch.Tensor,
        invalid_drafts: torch.Tensor | None,
    ) -> tuple[Verification, torch.Tensor]:
        """Verify the ``packed`` requests' trees, and settle what follows; what is to be counted."""
        on_device = packed.to(sampled.device, non_blocking=True)
        return self._walk_and_settle(on_device, sampled, processed, invalid_drafts)

    def _walk_and_settle(
        self,
        packed: torch.Tensor,
        sampled: torch.Tensor,
        processed: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
        room: Walked | None = None,
    ) -> tuple[Verification, torch.Tensor]:
        """``room``: for what rule ``match`` gives, if it is to lie at certain addresses."""
        requests = Requests(packed, self.trees.spare)
        with self._clock("walk"):
            if not self.trees.plan.reads_draws:
                walked = self._match(requests, sampled, invalid_drafts, room)
                found, counted = Verification(*walked[:-1]), walked.report
            elif processed is not None:
                found = self._walk_draws(requests, processed)
                counted = report(self.trees, requests.slots, found)
            else:
                raise RuntimeError(f"rule {self.trees.plan.rule!r} needs the target's logits")
        self._settle(found, requests)
        return found, counted

    def _match(
        self,
        requests: Requests,
        sampled: torch.Tensor,
        invalid_drafts: torch.Tensor | None,
        room: Walked | None,
    ) -> Walked:
        buffers = self._buffers
        walked = self.room_for(len(requests.packed)) if room is None else room
        rows = (sampled, buffers.input_ids, buffers.positions, buffers.seq_lens, invalid_drafts)
        batch = BatchRows(requests.packed, *rows)
        self._sample_and_match(batch, self.trees.arrays, walked, ranked=self._ranked)
        return walked

    def room_for(self, requests: int) -> Walked:
        """Memory for what a walk of so many requests gives."""
        shape, device = self.trees.shape, self._buffers.device
        return room_for(requests, shape.node_budget, shape.max_depth, device, ranked=self._ranked)

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
        bound = batch.seq_lens_cpu_upper_bound.numpy()
        keep = self.trees.plan.reads_draws or (
            want_logprobs and self.sampler.logprobs_mode.startswith("processed")
        )
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
        whole = tokens[0] if len(tokens) == 1 else torch.cat(tokens)
        return whole, torch.cat(kept) if keep else logits[:0]

    def _rows(self, requests: Requests, num_rows: int) -> LogitRows:
        trees, buffers = self.trees, self._buffers
        # A tree that was proposed while the prompt was incomplete starts from a token that was
        # never sampled.
        positions = buffers.positions[requests.root]
        room = torch.where(positions >= requests.prefill_len, requests.drafts, 0)
        # The scheduler may cut a tree short; parents stand first, so what is left is a tree.
        counts = torch.minimum(room, trees.counts[requests.slots])

        nodes = torch.arange(trees.shape.node_budget, device=room.device)
        rows = (requests.first[:, None] + 1 + nodes).clamp(max=num_rows - 1)
        last = buffers.input_ids.shape[0] - 1
        tokens = buffers.input_ids[(requests.root[:, None] + 1 + nodes).clamp(max=last)].long()
        return LogitRows(requests.first, rows, positions, tokens, room, counts)

    def _walk_draws(self, requests: Requests, logits: torch.Tensor) -> Verification:
        """``logits`` [rows, V]: after temperature, top-k, penalties and whatever else applies.

        A node that a grammar forbids needs no mask: its probability is 0, and it stays a try.
        """
        trees, temperature, seeds = self.trees, requests.temperature, requests.seeds
        rows = self._rows(requests, logits.shape[0])
        request = torch.arange(len(seeds), device=logits.device)
        row_of = rows.root_and_nodes

        def target(at: torch.Tensor) -> torch.Tensor:
            here = logits[row_of[request, at + 1]].float()
            best = torch.zeros_like(here).scatter_(1, here.argmax(dim=1, keepdim=True), 1.0)
            return torch.where(temperature[:, None] > 0, here.softmax(dim=1), best)

        depth, children = trees.shape.max_depth, trees.plan.growing.children
        position = rows.positions
        levels = position[:, None] + 1 + torch.arange(depth, device=position.device)
        tries = stream(seeds, ACCEPT)[:, None].expand(-1, depth)
        uniforms = uniform(self._gumbel(tries.flatten(), levels.flatten(), children))
        rule = DRAWN_RULES[trees.plan.rule]
        walk = rule.walk(
            rows.tokens,
            trees.draws(requests.slots),
            # Not the trees' counts: where draws coincide these tell of the tokens.
            rows.room,
            target,
            uniforms.view(len(seeds), depth, children),
        )
        after = position + 1 + walk.lengths
        noise = self._gumbel(stream(seeds, BONUS), after, logits.shape[1])
        return self._emit(walk.emit(rows.tokens, noise), rows, requests)

    def _emit(self, accepted: Accepted, rows: LogitRows, requests: Requests) -> Verification:
        # The last token of a prompt that is incomplete is no output.
        complete = self._buffers.seq_lens[: len(rows.roots)] >= requests.prefill_len
        emitted = torch.where(complete, accepted.lengths + 1, 0)
        rejected = torch.where(complete, requests.drafts + 1 - emitted, 0)
        return Verification(
            accepted.path,
            accepted.tokens,
            requests.root,
            rows.positions,
            rows.counts,
            emitted.int(),
            rejected.int(),
        )

    def _gumbel(self, seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
        zeros = torch.zeros(seeds.shape[0], count, device=seeds.device)
        return self._perturb(zeros, torch.ones_like(zeros[:, 0]), seeds, positions)

    def _logprobs(
        self,
        scores: torch.Tensor,
        batch: InputBatch,
        found: Verification,
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
            max=found.tokens.shape[1] - 1
        )
        on_path = torch.nn.functional.pad(found.path + 1, (1, 0)).clamp(min=0)
        rows = first[request] + on_path[request, step]
        return compute_topk_scores(
            scores[rows],
            num_logprobs,
            found.tokens[request, step],
            batch.cu_num_logits_np.tolist(),  # sync: host memory
            self.sampler.logprob_token_ids_state,
            batch.expanded_idx_mapping,
            num_token_ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )
