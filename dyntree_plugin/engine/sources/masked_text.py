"""Block drafts that read masks after the text, as it stands: PARD and P-EAGLE.

PARD (arXiv 2504.18583) is a draft model that reads masks. P-EAGLE is an EAGLE-3 head that reads
them, with a learned hidden state before each. One causal forward runs the emitted tokens and the
masks after them. The last of these tokens, the root, proposes the first position, and each mask the
one after its own. The next step's emitted tokens overwrite the keys and values of masks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from dyntree_plugin.engine.sources.draft_models import FilledRows
from dyntree_plugin.engine.sources.head import joined
from dyntree_plugin.engine.step.catch_up import CatchUp, Masks, prompt_rows
from dyntree_plugin.engine.step.records import Emitted, TargetStates
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.rows import RowMemory, RowWriter

Run = Callable[[FilledRows, torch.Tensor | None], torch.Tensor]
"""Runs rows with a head's input, or none; returns what gives their logits [N, V]."""

Combine = Callable[[torch.Tensor], torch.Tensor]
"""Turns the target's hidden states [N, layers * H] into a head's input [1 + N, H], of which the
first is that of masks."""


class MaskedText:
    """The `BlockReader` of a draft that reads masks.

    Its state between two calls lies at fixed addresses: the hidden states that give the logits.
    """

    def __init__(
        self,
        run: Run,
        logits: Callable[[torch.Tensor], torch.Tensor],
        speculator: DraftModelSpeculator,
        memory: RowMemory,
        writer: RowWriter,
        *,
        mask: int,
        hidden: torch.Tensor,
        of_head: tuple[Combine, torch.Tensor] | None = None,
    ) -> None:
        """``speculator``: vLLM's, which builds attention metadata for prompts. ``mask``: the token.
        ``hidden`` [R, length, L]: room for what gives the logits. ``of_head``: what makes a head's
        input, and room for it, [1 + R * E, H]; None for a draft model."""
        self._run_rows, self._logits = run, logits
        self._speculator = speculator
        self._memory = memory
        self._writer = writer
        self._hidden = hidden
        self._of_head = of_head
        self._masks = Masks(hidden.shape[1] - 1, mask)
        self.shift = memory.shift

    def receive(self, emitted: Emitted, target: TargetStates) -> None:
        """Copy the target's states before the emitted tokens: of the root and the accepted path."""
        if self._of_head is not None:
            combine, given = self._of_head
            before = target.rows_before(emitted.most).flatten()
            states = combine(joined(target, before))
            given[: len(states)].copy_(states)

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
        if self._of_head is not None:
            of_text = 1 + most * torch.arange(num_reqs, device=memory.device)[:, None] + step
            states = self._of_head[1].index_select(0, of_text.masked_fill(~is_text, 0).flatten())
        self._run(rows, states, last)

    def follow_prompts(self, step: CatchUp) -> None:
        """Do as `follow` where some requests are in their prompt, whose chunks are run as well."""
        rows = prompt_rows(self._speculator, self._memory, step, self._masks)
        states = None
        if self._of_head is not None:
            states = self._of_head[0](joined(step.target, rows.read))
            states = torch.where(rows.masked[:, None], states[:1], states[1:])
        self._run(rows, states, rows.last)

    def offer(self, requests: int) -> tuple[torch.Tensor, ...]:
        """Return the logits of the positions after the roots."""
        return (self._logits(self._hidden[:requests].flatten(0, 1)),)

    def score(self, tokens: torch.Tensor | None, *offered: torch.Tensor) -> torch.Tensor:
        return offered[0]

    def _run(self, rows: FilledRows, states: torch.Tensor | None, last: torch.Tensor) -> None:
        """Run filled rows, of which ``last`` int64 [R] are the roots'."""
        hidden = self._run_rows(rows, states)
        length = self._hidden.shape[1]
        # At the end of the longest text there are fewer masks.
        at = last[:, None] + torch.arange(length, device=last.device)
        at = at.clamp(max=len(hidden) - 1).flatten()
        torch.index_select(hidden, 0, at, out=self._hidden[: len(last)].flatten(0, 1))
