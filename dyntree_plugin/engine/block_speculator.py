"""vLLM's speculator with trees that a block draft proposes in one forward."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash.utils import load_dflash_model
from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

from dyntree_plugin.engine.head_speculator import forward_context
from dyntree_plugin.engine.offloading import on_device
from dyntree_plugin.engine.sources.block import BlockDraft
from dyntree_plugin.engine.sources.state_blocks import StateBlocks
from dyntree_plugin.engine.speculator import NodeProposals
from dyntree_plugin.engine.step.rows import RowMemory, RowWriter
from dyntree_plugin.engine.step.source import NodeSource


class BlockSpeculator(NodeProposals):
    """Loads, profiles and places a block draft as the stock class does."""

    model: Any
    # The draft keeps the target's states, and its cache ends before the root.
    row_shift = StateBlocks.shift

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.length = self.compose.trees.plan.shape.block
        config: Any = self.draft_model_config.hf_config
        self.mask_token = get_parallel_drafting_token_id(config)
        self.causal = not dflash_has_any_non_causal(config)
        anchored = getattr(config, "sample_from_anchor", True)
        self.root_proposes = self.method == "dspark" and anchored
        # Before vLLM profiles the memory, so that it is counted.
        most = self.max_num_reqs * (self.compose.trees.plan.shape.max_depth + 1)
        dtype: Any = self.dtype  # vLLM has resolved its name by now
        self.given = torch.zeros(most, self.hidden_size, dtype=dtype, device=self.device)

    @on_device()
    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Load the draft, which shares the target's embedding and output layer if it has none.

        For the draft ``num_speculative_tokens`` is the length of its block. Unless another backend
        of attention is named for it, it has the one that is named for the target.
        """
        copied = copy.copy(self.vllm_config)
        copied.speculative_config = copy.copy(self.speculative_config)
        copied.speculative_config.num_speculative_tokens = self.length
        if copied.speculative_config.attention_backend is None:
            copied.speculative_config.attention_backend = copied.attention_config.backend
        load = load_dspark_model if self.method == "dspark" else load_dflash_model
        loaded: nn.Module = load(target_model, copied)
        if not self.causal:  # Attention must know how windows lie.
            layers: Any = loaded.get_submodule("model.layers")
            for layer in layers:
                layer.self_attn.attn.impl.both_ways = True
        return loaded

    def make_source(self, memory: RowMemory, writer: RowWriter) -> NodeSource:
        reader = StateBlocks(self, self, memory, writer, length=self.length, given=self.given)
        return BlockDraft(reader, memory, self.length)

    def rehearse(
        self, batch: InputBatch, hidden: tuple[torch.Tensor, ...], most_logits: bool
    ) -> None:
        """Run one forward."""
        rows = batch.num_tokens
        ids, positions = batch.input_ids[:rows], batch.positions[:rows]
        states = self.combine(torch.cat([layer[:rows] for layer in hidden], dim=-1))
        self.keep(states, positions, None)
        found = self.run(ids, positions, None, None)
        at = self.rows_of_logits(batch, most_logits)
        self.score(ids[at], *self.offer(found[at]))

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn the target's hidden states into the draft's; see `LoadedBlock`."""
        combined: torch.Tensor = self.model.combine_hidden_states(hidden)
        return combined

    def offer(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return logits; see `LoadedBlock`."""
        return (self.compute_draft_logits(hidden, 0),)

    def score(self, tokens: torch.Tensor, *offered: torch.Tensor) -> torch.Tensor:
        """Add to the logits what the tokens before them make likely; see `LoadedBlock`."""
        (logits,) = offered
        if self.method != "dspark":
            return logits
        bias: torch.Tensor = self.model.markov_bias(self.model.markov_embed(tokens))
        return logits + bias

    def keep(
        self, states: torch.Tensor, positions: torch.Tensor, slots: dict[str, torch.Tensor] | None
    ) -> None:
        """Write keys and values; see `LoadedBlock`."""
        names = [layer.self_attn.attn.layer_name for layer in self.model.model.layers]
        of_layers = None if slots is None else [slots[name] for name in names]
        self.model.precompute_and_store_context_kv(states, positions, of_layers)

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, Any] | None,
        slots: dict[str, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Run the rows of blocks; see `LoadedBlock`."""
        with forward_context(self.vllm_config, len(ids), metadata, slots):
            found: torch.Tensor = self.model(input_ids=ids, positions=positions, inputs_embeds=None)
        return found


class CandidateSpeculator(BlockSpeculator):
    """Drafts with DFlash2, which scores pairs of candidates of neighbouring positions."""

    def offer(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return candidates, their logits, and what weighs their pairs; see `LoadedBlock`."""
        candidates, logits = self.model.compute_candidates(hidden)
        return candidates, logits, self.model.model.candidate_selector.hidden_projection(hidden)

    def score(self, tokens: torch.Tensor, *offered: torch.Tensor) -> torch.Tensor:
        """Score the pairs of tokens and candidates; no other token has a chance."""
        candidates, logits, weights = offered
        selector = self.model.model.candidate_selector
        before = selector.predecessor_codebook[tokens] * weights
        pairs = torch.einsum("nr,nkr->nk", before, selector.successor_codebook[candidates])
        found = logits.new_full((len(logits), self.compose.trees.vocabulary), -torch.inf)
        return found.scatter_(1, candidates, logits + pairs)
