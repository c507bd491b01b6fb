"""Block drafts that read the target's hidden states: DFlash, DFlash2 and DSpark.

The draft keeps keys and values of the target's hidden states for the text before the root, and none
of tokens. All rows of a block see each other. DFlash (arXiv 2602.06036) describes such drafts.
DSpark adds to the logits what the token before the position makes likely, and lets the root propose
the first token. DFlash2 does the former for some candidates, and proposes no other token.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from dyntree_plugin.engine.sources.head import joined
from dyntree_plugin.engine.step.catch_up import CatchUp, prompt_rows
from dyntree_plugin.engine.step.records import Emitted, TargetStates
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.rows import PAD_SLOT, RowMemory, RowWriter, TreeRows, first_bits


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
