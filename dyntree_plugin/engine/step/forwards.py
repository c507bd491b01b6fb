"""A separate draft model as a source of candidates: its forwards over rows that see a tree."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from dyntree_kernels.contracts import StepGrowth
from dyntree_plugin.engine.step.catch_up import CatchUpPlan, prompt_rows
from dyntree_plugin.engine.step.records import Emitted
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.rows import RowMemory, RowWriter, TreeRows


class DraftModel:
    """The `NodeSource` that runs a separate draft model of vLLM's.

    Its state between two calls lies in `RowMemory`: the roots' positions and hidden states.
    """

    def __init__(self, model: StandaloneARSpeculator, memory: RowMemory, writer: RowWriter) -> None:
        self._model = model
        self._memory = memory
        self._writer = writer
        # Of this step, by requests and width: metadata takes the host 0.1 ms to build.
        self._rows: dict[tuple[int, int], TreeRows] = {}

    def follow(self, requests: Requests, emitted: Emitted) -> None:
        """Read the emitted tokens, the last of which are the new roots; all requests decode."""
        rows = self._writer.chain(requests, emitted)
        num_reqs = len(emitted.roots)
        last = self._memory.root_rows[:num_reqs]
        torch.index_select(self._hidden(rows), 0, last, out=self._memory.root_hidden[:num_reqs])

    def follow_prompts(
        self,
        batch: InputBatch,
        plan: CatchUpPlan,
        emitted: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> None:
        """Do as `follow` where some requests are in their prompt, whose chunks are read as well.

        ``emitted`` [R, E]: tokens, the first ``num_sampled[r]`` of which are real.
        """
        rows = prompt_rows(self._model, self._memory, batch, plan, emitted, num_sampled)
        hidden = self._model._run_model(
            self._memory.ids[: plan.num_rows],
            self._memory.positions[: plan.num_rows],
            rows.metadata,
            rows.slots_by_layer,
            None,
        )
        requests = batch.num_reqs
        self._memory.root_hidden[:requests] = hidden[rows.last]
        self._memory.root_positions[:requests] = self._memory.positions[rows.last]

    def begin(self, growth: StepGrowth, requests: Requests, chained: torch.Tensor) -> None:
        """Start growth at the roots; ``chained`` bool [slots + 1]: requests with chains."""
        self._rows.clear()
        self._writer.begin(growth, requests, chained)

    def root_logits(self, requests: int) -> torch.Tensor:
        """Return the draft's logits after the roots, [R, V]."""
        return self._model.compute_draft_logits(self._memory.root_hidden[:requests], 0)

    def rows(self, requests: int, width: int) -> TreeRows:
        """Return the rows of a forward over ``width`` nodes per request, for growth to fill."""
        shape = requests, width
        if shape not in self._rows:
            self._rows[shape] = self._memory.tree_rows(requests, width, self._memory.scratch)
        return self._rows[shape]

    def forward(self, rows: TreeRows) -> torch.Tensor:
        """Run the draft over filled rows; return the logits of all of them, [R * width, V]."""
        return self._model.compute_draft_logits(self._hidden(rows), 0)

    def _hidden(self, rows: TreeRows) -> torch.Tensor:
        return self._model._run_model(
            rows.ids, rows.positions, rows.metadata, rows.slots_by_layer, None
        )
