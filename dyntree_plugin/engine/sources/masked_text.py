"""Block drafts that read masks after the text, as it stands: PARD and P-EAGLE.

PARD (arXiv 2504.18583) is a draft model that reads masks. P-EAGLE is an EAGLE-3 head that reads
them, with a learned hidden state before each. One causal forward runs the emitted tokens and the
masks after them. The last of these tokens, the root, proposes the first position, and each mask the
one after its own. The next step's emitted tokens overwrite the keys and values of masks.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn.functional import pad
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from dyntree_plugin.engine.sources.draft_models import FilledRows
from dyntree_plugin.engine.sources.head import joined
from dyntree_plugin.engine.step.catch_up import CatchUp, Masks, prompt_rows
from dyntree_plugin.engine.step.records import Emitted
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.rows import RowMemory, RowWriter


class LoadedMasked(Protocol):
    """A loaded draft that reads masks, and its ``mask_token``."""

    mask_token: int

    def combine_masked(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn the target's hidden states [N, layers * H] into a head's input [1 + N, H], of which
        the first is that of masks."""
        ...

    def run_masked(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor | None,
        metadata: dict[str, Any] | None,
        slots: dict[str, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Run rows; return what gives their logits. ``states``: a head's input, or None."""
        ...

    def masked_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V]."""
        ...


class MaskedText:
    """The `BlockReader` of a draft that reads masks.

    Its state between two calls lies at fixed addresses: the hidden states that give the logits.
    """

    def __init__(
        self,
        draft: LoadedMasked,
        speculator: DraftModelSpeculator,
        memory: RowMemory,
        writer: RowWriter,
        *,
        hidden: torch.Tensor,
        given: torch.Tensor | None = None,
    ) -> None:
        """``speculator``: vLLM's, which builds attention metadata for prompts. ``hidden``
        [R, length, L]: room for what gives the logits. ``given`` [1 + R * E, H]: room for a head's
        input; None for a draft model."""
        self._draft = draft
        self._speculator = speculator
        self._memory = memory
        self._writer = writer
        self._hidden = hidden
        self._given = given
        self._masks = Masks(hidden.shape[1] - 1, draft.mask_token)
        self.shift = memory.shift

    def receive(self, step: CatchUp) -> None:
        """Copy the target's states before the emitted tokens: of the root and the accepted path."""
        if self._given is not None:
            before = step.target.rows_before(step.emitted.most).flatten()
            states = self._draft.combine_masked(joined(step.target, before))
            self._given[: len(states)].copy_(states)

    def follow(self, requests: Requests, emitted: Emitted) -> None:
        """Run the emitted tokens and the masks; all requests decode."""
        memory, masks, most = self._memory, self._masks, emitted.most
        num_reqs, width = len(emitted.roots), most + masks.number
        step = torch.arange(width, device=memory.device)
        is_text = step < emitted.counts[:, None]
        tokens = pad(emitted.tokens[:, :most], (0, masks.number))
        tokens = tokens.masked_fill(~is_text, masks.token)
        counts = emitted.counts + masks.number
        rows = self._writer.chain(requests, Emitted(emitted.roots, tokens, counts, most=width))
        # The roots come before the masks. Padding requests may hold a count of another batch.
        final = (emitted.counts.long() - 1).clamp(min=0, max=most - 1)
        last, roots = memory.root_rows[:num_reqs], memory.root_positions[:num_reqs]
        torch.add(memory.starts(num_reqs, width)[:-1], final, out=last)
        torch.clamp(emitted.roots + 1 + final, max=memory.last_position, out=roots)
        states = None
        if self._given is not None:
            of_text = 1 + most * torch.arange(num_reqs, device=memory.device)[:, None] + step
            states = self._given.index_select(0, of_text.masked_fill(~is_text, 0).flatten())
        self._run(rows, states, last)

    def follow_prompts(self, step: CatchUp) -> None:
        """Do as `follow` where some requests are in their prompt, whose chunks are run as well."""
        rows = prompt_rows(self._speculator, self._memory, step, self._masks)
        self._memory.root_positions[: step.batch.num_reqs] = rows.root_positions
        states = None
        if self._given is not None:
            states = self._draft.combine_masked(joined(step.target, rows.read))
            states = torch.where(rows.masked[:, None], states[:1], states[1:])
        self._run(rows, states, rows.last)

    def offer(self, requests: int) -> tuple[torch.Tensor, ...]:
        """Return the logits of the positions after the roots."""
        return (self._draft.masked_logits(self._hidden[:requests].flatten(0, 1)),)

    def score(self, tokens: torch.Tensor | None, *offered: torch.Tensor) -> torch.Tensor:
        return offered[0]

    def _run(self, rows: FilledRows, states: torch.Tensor | None, last: torch.Tensor) -> None:
        """Run filled rows, of which ``last`` int64 [R] are the roots'."""
        hidden = self._draft.run_masked(
            rows.ids, rows.positions, states, rows.metadata, rows.slots_by_layer
        )
        length = self._hidden.shape[1]
        # At the end of the longest text there are fewer masks.
        at = last[:, None] + torch.arange(length, device=last.device)
        at = at.clamp(max=len(hidden) - 1).flatten()
        torch.index_select(hidden, 0, at, out=self._hidden[: len(last)].flatten(0, 1))
