"""A head of the target as a source of candidates: EAGLE, EAGLE-3, and MTP of one module.

A head reads a token together with the hidden state before it: that of the target where the target
has read the text, else that of its own row for the node's parent. So its rows stand one position
before their tokens, and its forwards hand hidden states on to later ones. EAGLE
(arXiv 2401.15077, section 3) and EAGLE-3 (arXiv 2503.01840, section 3) describe such heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model
from vllm.v1.worker.gpu.spec_decode.gemma4.speculator import Gemma4Speculator

from dyntree_plugin.engine.drafts.base import NodeProposals, forward_context
from dyntree_plugin.engine.drafts.draft_model import FilledRows
from dyntree_plugin.engine.offloading import on_device
from dyntree_plugin.engine.pipeline.whole_draft import as_one_stage
from dyntree_plugin.engine.step.catch_up import CatchUp, prompt_rows
from dyntree_plugin.engine.step.records import Emitted, TargetStates
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.rows import RowMemory, RowWriter, TreeRows
from dyntree_plugin.engine.step.source import NodeSource
from dyntree_plugin.tree.plan import TreePlan


def joined(target: TargetStates, at: torch.Tensor) -> torch.Tensor:
    """Return the target's hidden states in rows ``at`` int64 [N] of a step, [N, layers * H]."""
    selected = [layer.index_select(0, at) for layer in target.hidden]
    return selected[0] if len(selected) == 1 else torch.cat(selected, dim=-1)


class HeadStates:
    """Hidden states of R requests that pass from one forward to another, at fixed addresses.

    ``given`` [R * E, H]: the head's input for emitted tokens, from the target. ``own``
    [R, expansions, H]: of what a step expands, from the head's own rows; the first is the root's.
    ``root`` [R, L]: what gives the logits after the roots.
    """

    def __init__(
        self,
        requests: int,
        most_emitted: int,
        expansions: int,
        hidden_size: int,
        logits_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.given = zeros(requests * most_emitted, hidden_size)
        self.own = zeros(requests, expansions, hidden_size)
        self.root = zeros(requests, logits_size)


class TargetHead:
    """The `NodeSource` that runs a head of the target."""

    shift = -1
    kept: tuple[torch.Tensor, ...] = ()

    def __init__(
        self,
        head: HeadSpeculator,
        states: HeadStates,
        memory: RowMemory,
        writer: RowWriter,
    ) -> None:
        self._head = head
        self._states = states
        self._memory = memory
        self._writer = writer

    def receive(self, emitted: Emitted, target: TargetStates) -> None:
        """Copy the target's states before the emitted tokens: of the root and the accepted path."""
        before = target.rows_before(emitted.most).flatten()
        states = self._combined(target, before)
        self._states.given[: len(before)].copy_(states)

    def follow(self, requests: Requests, emitted: Emitted) -> None:
        """Read the emitted tokens, the last of which are the new roots; all requests decode."""
        rows = self._writer.chain(requests, emitted)
        last = self._memory.root_rows[: len(emitted.roots)]
        self._read(rows, self._states.given[: len(rows.ids)], last)

    def follow_prompts(self, step: CatchUp) -> None:
        """Do as `follow` where some requests are in their prompt, whose chunks are read as well."""
        rows = prompt_rows(self._head, self._memory, step)
        self._read(rows, self._combined(step.target, rows.read), rows.last)

    def root_logits(self, requests: int) -> torch.Tensor:
        """Return the logits after the roots, [R, V]."""
        return self._head.compute_draft_logits(self._states.root[:requests], 0)

    def forward(self, rows: TreeRows, requests: int, first: int) -> torch.Tensor:
        """Run the head over filled rows; return the logits of all of them, [R * width, V]."""
        own = self._states.own
        states = own.flatten(0, 1).index_select(0, rows.above)
        hidden, states = self._run(rows, states)
        width = len(rows.ids) // max(1, requests)
        own[:requests, first : first + width].copy_(states.view(requests, width, -1))
        return self._head.compute_draft_logits(hidden, 0)

    def _read(self, rows: FilledRows, states: torch.Tensor, last: torch.Tensor) -> None:
        """Read filled rows, of which ``last`` int64 [R] are the roots'."""
        hidden, states = self._run(rows, states)
        torch.index_select(hidden, 0, last, out=self._states.root[: len(last)])
        torch.index_select(states, 0, last, out=self._states.own[: len(last), 0])

    def _combined(self, target: TargetStates, at: torch.Tensor) -> torch.Tensor:
        return self._head.combine(joined(target, at))

    def _run(self, rows: FilledRows, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._head.run(rows.ids, rows.positions, states, rows.metadata, rows.slots_by_layer)


class ContextHead(TargetHead):
    """A head whose rows read the target's KV cache, and see the context alone: Gemma-4's module.

    It writes no keys or values. So it reads no emitted token but the root, and all nodes stand
    where the root does. With prompts it has a row for every token, as in vLLM's chain, and the
    roots' alone are used.
    """

    def receive(self, emitted: Emitted, target: TargetStates) -> None:
        """Copy the target's states before the roots."""
        before = target.rows_before(emitted.most)
        states = self._combined(target, before.gather(1, _last(emitted))[:, 0])
        self._states.given[: len(states)].copy_(states)

    def follow(self, requests: Requests, emitted: Emitted) -> None:
        last = _last(emitted)
        root = emitted.tokens.gather(1, last)
        one = torch.ones_like(emitted.counts)
        super().follow(requests, Emitted(emitted.roots + last[:, 0], root, one, most=1))

    def forward(self, rows: TreeRows, requests: int, first: int) -> torch.Tensor:
        """Run the head over filled rows; return the logits of all of them, [R * width, V]."""
        # While graphs are captured, roots stand at 0.
        roots = (self._memory.root_positions[:requests, None] + self.shift).clamp(min=0)
        rows.positions.view(requests, -1).copy_(roots.expand(requests, len(rows.ids) // requests))
        return super().forward(rows, requests, first)


def _last(emitted: Emitted) -> torch.Tensor:
    """Return the number of each request's last emitted token, int64 [R, 1]."""
    # Padding requests may hold a count of another batch.
    return (emitted.counts.long() - 1).clamp(min=0, max=emitted.most - 1)[:, None]


class HeadSpeculator(NodeProposals):
    """Loads, profiles and places a head as the stock class does."""

    source: type[TargetHead] = TargetHead

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Before vLLM profiles the memory, so that it is counted.
        self.allocate(self.compose.trees.plan)

    def allocate(self, plan: TreePlan) -> None:
        """Make room for what passes from one forward to another."""
        self.states = HeadStates(
            self.max_num_reqs,
            plan.shape.max_depth + 1,
            1 + plan.scratch_slots,
            self.hidden_size,
            self.logits_size,
            self.dtype,  # type: ignore[arg-type]  # vLLM has resolved its name by now
            self.device,
        )

    @property
    def logits_size(self) -> int:
        """Size of what gives a row's logits."""
        return self.hidden_size

    @on_device()
    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Load the head, which shares the target's embedding and output layer if it has none."""
        return load_eagle_model(target_model, self.vllm_config)

    def make_source(self, memory: RowMemory, writer: RowWriter) -> NodeSource:
        return self.source(self, self.states, memory, writer)

    def rehearse(
        self, batch: InputBatch, hidden: tuple[torch.Tensor, ...], most_logits: bool
    ) -> None:
        """Run one forward."""
        rows = batch.num_tokens
        joined = torch.cat([layer[:rows] for layer in hidden], dim=-1)
        # A catch-up selects rows, too; in vLLM's profile this is as large as it ever is.
        every = torch.arange(rows, device=joined.device)
        states = self.combine(joined.index_select(0, every))
        ids, positions = batch.input_ids[:rows], batch.positions[:rows]
        found, _ = self.run(ids, positions, states, None, None)
        self.compute_draft_logits(found[self.rows_of_logits(batch, most_logits)], 0)

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn the target's hidden states [N, layers * H] into the head's input [N, H]."""
        if self.method != "eagle3":
            return hidden
        model: Any = self.model
        combined: torch.Tensor = model.combine_hidden_states(hidden)
        return combined

    @as_one_stage()
    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        metadata: dict[str, Any] | None,
        slots: dict[str, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows; return what gives their logits, and their hidden states for later rows."""
        with forward_context(self.vllm_config, len(ids), metadata, slots):
            found = self.model(
                input_ids=ids, positions=positions, hidden_states=states, inputs_embeds=None
            )
        # Some heads return one tensor for both.
        return found if isinstance(found, tuple) else (found, found)


class ContextSpeculator(HeadSpeculator, Gemma4Speculator):
    """Drafts with Gemma-4's module, which reads the target's KV cache."""

    source = ContextHead
    context_only = True
    load_draft_model = on_device()(Gemma4Speculator.load_draft_model)

    @property
    def logits_size(self) -> int:
        # The module is narrower than the states that it hands on, which have the target's size.
        return int(self.draft_model_config.hf_text_config.hidden_size)
