"""A block draft as a source of candidates: one forward proposes tokens for several positions.

Its forward runs the root and a mask for each of the next positions, and what it says of a position
depends on no node, or on the node before it alone. DDTree (arXiv 2604.12989) grows trees from the
product of the positions' probabilities.

`StateBlocks` runs drafts that read the target's hidden states: DFlash, DFlash2 and DSpark. They
keep keys and values of these states for the text before the root, and none of tokens. All rows of a
block see each other. DFlash (arXiv 2602.06036) describes such drafts. DSpark adds to the logits
what the token before the position makes likely, and lets the root propose the first token. DFlash2
does the former for some candidates, and proposes no other token.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import nn
from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash.utils import load_dflash_model
from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

from dyntree_plugin.engine.drafts.base import NodeProposals, forward_context
from dyntree_plugin.engine.drafts.head import joined
from dyntree_plugin.engine.offloading import on_device
from dyntree_plugin.engine.step.catch_up import CatchUp, prompt_rows
from dyntree_plugin.engine.step.records import Emitted, TargetStates
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.rows import PAD_SLOT, RowMemory, RowWriter, TreeRows, first_bits
from dyntree_plugin.engine.step.source import NodeSource


class BlockReader(Protocol):
    """Runs a block draft: what it reads of a text, and the blocks after the roots.

    ``receive``, ``follow`` and ``follow_prompts`` are those of a `NodeSource`, and so is ``shift``.
    """

    @property
    def shift(self) -> int: ...
    def receive(self, emitted: Emitted, target: TargetStates) -> None: ...
    def follow(self, requests: Requests, emitted: Emitted) -> None: ...
    def follow_prompts(self, step: CatchUp) -> None: ...

    def offer(self, requests: int) -> tuple[torch.Tensor, ...]:
        """Return what `score` makes the logits of the positions after the roots from, each with
        R * length entries."""
        ...

    def score(self, tokens: torch.Tensor | None, *offered: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] after ``tokens`` [N] from N entries of what was offered.

        ``tokens``: None for the roots.
        """
        ...


class BlockDraft:
    """The `NodeSource` that looks up the logits of a block.

    Growth's rows are those of nodes, which no model runs. What a step's blocks offer, mostly
    logits [R, length, V], is as large as what vLLM's own chains compute, and is freed with the next
    step's.
    """

    def __init__(self, reader: BlockReader, memory: RowMemory, length: int) -> None:
        """``length``: positions after the root that a block gives logits for."""
        self.reader = reader
        self._memory = memory
        self._length = length
        self.kept: tuple[torch.Tensor, ...] = ()

    @property
    def shift(self) -> int:
        return self.reader.shift

    def receive(self, emitted: Emitted, target: TargetStates) -> None:
        """Copy what the draft reads of the target's hidden states."""
        self.reader.receive(emitted, target)

    def follow(self, requests: Requests, emitted: Emitted) -> None:
        """Read the emitted tokens, the last of which are the new roots; all requests decode."""
        self.reader.follow(requests, emitted)

    def follow_prompts(self, step: CatchUp) -> None:
        """Do as `follow` where some requests are in their prompt, whose chunks are read as well."""
        self.reader.follow_prompts(step)

    def root_logits(self, requests: int) -> torch.Tensor:
        """Return the logits of the first positions after the roots, [R, V]."""
        shape = requests, self._length
        offered = self.reader.offer(requests)
        self.kept = tuple(each.reshape(shape + each.shape[1:]) for each in offered)
        return self.reader.score(None, *(each[:, 0] for each in self.kept))

    def forward(self, rows: TreeRows, requests: int, first: int) -> torch.Tensor:
        """Return the logits of the position after each node, [R * width, V]."""
        roots = self._memory.root_positions[:requests, None]
        depths = rows.positions.view(requests, -1) - roots
        blocks = torch.arange(requests, device=depths.device)[:, None] * self._length
        at = (blocks + depths.clamp(min=0, max=self._length - 1)).flatten()
        of_rows = (each.flatten(0, 1).index_select(0, at) for each in self.kept)
        return self.reader.score(rows.ids, *of_rows)


class LoadedBlock(Protocol):
    """A block draft that is loaded: its ``mask_token``, whether a position of a block sees only
    those before it, and whether the root's row gives the first token's logits, and no mask's."""

    mask_token: int
    causal: bool
    root_proposes: bool

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn the target's hidden states [N, layers * H] into what `keep` takes, [N, H]."""
        ...

    def keep(
        self, states: torch.Tensor, positions: torch.Tensor, slots: dict[str, torch.Tensor] | None
    ) -> None:
        """Write the keys and values of combined states [N, H]; ``slots``: None to write none."""
        ...

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, Any] | None,
        slots: dict[str, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Run the rows of blocks; return what gives their logits."""
        ...

    def offer(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what `score` makes logits from, each with an entry for each of ``hidden``."""
        ...

    def score(self, tokens: torch.Tensor, *offered: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] after ``tokens`` [N] from N entries of what was offered."""
        ...


class StateBlocks:
    """The `BlockReader` of a draft that reads the target's hidden states."""

    shift = -1

    def __init__(
        self,
        block: LoadedBlock,
        speculator: DraftModelSpeculator,
        memory: RowMemory,
        writer: RowWriter,
        *,
        length: int,
        given: torch.Tensor,
    ) -> None:
        """``speculator``: vLLM's, which builds attention metadata for prompts. ``length``: tokens
        of a block, without the root. ``given`` [R * E, H]: room for combined states before emitted
        tokens."""
        self._block = block
        self._speculator = speculator
        self._memory = memory
        self._writer = writer
        self._length = length
        self._given = given
        self.root_ids = torch.zeros(memory.requests, dtype=torch.int32, device=memory.device)
        self._width = length if block.root_proposes else 1 + length

    def receive(self, emitted: Emitted, target: TargetStates) -> None:
        """Copy the target's states before the emitted tokens: of the root and the accepted path."""
        before = target.rows_before(emitted.most).flatten()
        self._given[: len(before)].copy_(self._block.combine(joined(target, before)))

    def follow(self, requests: Requests, emitted: Emitted) -> None:
        """Keep the states before the emitted tokens, the last of which are the new roots."""
        rows = self._writer.chain(requests, emitted)
        last = self._memory.root_rows[: len(emitted.roots)]
        self._keep(rows, self._given[: len(rows.ids)], last)

    def follow_prompts(self, step: CatchUp) -> None:
        """Do as `follow` where some requests are in their prompt, whose chunks are kept as well."""
        rows = prompt_rows(self._speculator, self._memory, step)
        self._keep(rows, self._block.combine(joined(step.target, rows.read)), rows.last)

    def offer(self, requests: int) -> tuple[torch.Tensor, ...]:
        """Run the blocks after the roots; return what they offer."""
        rows = self._rows(requests)
        hidden = self._block.run(rows.ids, rows.positions, rows.metadata, rows.slots_by_layer)
        proposing = hidden.view(requests, self._width, -1)[:, self._width - self._length :]
        return self._block.offer(proposing.flatten(0, 1))

    def score(self, tokens: torch.Tensor | None, *offered: torch.Tensor) -> torch.Tensor:
        of_roots = self.root_ids[: len(offered[0])]
        return self._block.score(of_roots if tokens is None else tokens, *offered)

    def _keep(self, rows: Any, states: torch.Tensor, last: torch.Tensor) -> None:
        self._block.keep(states, rows.positions, rows.slots_by_layer)
        torch.index_select(rows.ids, 0, last, out=self.root_ids[: len(last)])

    def _rows(self, requests: int) -> TreeRows:
        """Fill the rows of the blocks: the roots, and the masks after them."""
        memory, width = self._memory, self._width
        places = memory.root_positions[:requests, None] + torch.arange(width, device=memory.device)
        real = places <= memory.last_position
        positions = places.clamp(max=memory.last_position)
        # Attention skips what only fills a batch up, and vLLM gives it no slots.
        filling = memory.ctx_lens[:requests] < 0
        index = memory.of_requests.slots[:requests].masked_fill(filling, PAD_SLOT)
        slots = memory.slots_of(index, positions, memory.slots)
        rows = memory.tree_rows(requests, width, columns=width)
        ids = rows.ids.view(requests, width)
        ids.fill_(self._block.mask_token)
        ids[:, 0] = self.root_ids[:requests]
        rows.positions.view(requests, width).copy_(positions)
        # No row sees a place after the longest text, which has no slot.
        seen = real.cumsum(1)
        seen = seen if self._block.causal else seen[:, -1:].expand(-1, width)
        rows.ancestor_bits.view(requests, width, -1).copy_(first_bits(seen))
        rows.slots.copy_(slots.masked_fill(~real, PAD_SLOT).flatten(1))
        return rows


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
