"""The stages of drafting: one growth, and the sources of its candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_kernels.contracts import StepGrowth, expansions_of
from dyntree_plugin.engine.step.catch_up import CatchUpPlan
from dyntree_plugin.engine.step.records import Emitted, TargetStates
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.rows import start
from dyntree_plugin.engine.step.source import NodeSource
from dyntree_plugin.engine.step.tensor_growth import TensorGrowth
from dyntree_plugin.tree.source import TrieSource


class DraftStages:
    """The stages of drafting as functions of the batch's requests.

    What passes from one to the next lies at fixed addresses, so each can be captured as a graph.
    """

    def __init__(
        self,
        source: NodeSource | None,
        tries: TrieSource | None,
        growth: StepGrowth,
        stored_at: torch.Tensor,
        widths: Sequence[int],
        chained: torch.Tensor,
        pays: Callable[[StepGrowth], bool],
    ) -> None:
        """Compose the sources of candidates with a growth.

        ``source``: a draft model; None without one. ``tries``: candidates that need no forward;
        None without any. ``stored_at`` int64 [the most requests]: memory for the slots of the
        trees, which `begin` of the source writes, too. ``widths``: nodes of a request in each
        forward. ``chained`` bool [slots + 1]: requests whose trees are chains. ``pays``: as in
        `TreeOps`.

        Raises:
            ValueError: if there is no source at all.
        """
        if source is None and tries is None:
            raise ValueError("growth needs a draft model or tries")
        self.widths = tuple(widths)
        self._stored_at = stored_at
        self._source = source
        self._tries = tries
        self._growth = growth
        self._chained = chained
        self._pays = pays

    @property
    def device(self) -> torch.device:
        return self._stored_at.device

    @property
    def has_draft(self) -> bool:
        """Whether a draft model has to catch up, and can make forwards."""
        return self._source is not None

    @property
    def resumable(self) -> bool:
        """Whether each stage can be captured by itself."""
        return not isinstance(self._growth, TensorGrowth)

    @property
    def shift(self) -> int:
        """That of the source of forwards."""
        return self._draft.shift

    def receive(self, emitted: Emitted, target: TargetStates) -> None:
        """Copy what `catch_up` reads of the target; it has no graph."""
        self._draft.receive(emitted, target)

    def catch_up(self, requests: Requests, emitted: Emitted) -> None:
        self._draft.follow(requests, emitted)

    def catch_up_prompts(
        self, batch: InputBatch, plan: CatchUpPlan, emitted: Emitted, target: TargetStates
    ) -> None:
        """Catch up in a batch with prompts; it has no graph."""
        self._draft.follow_prompts(batch, plan, emitted, target)

    def root(self, requests: Requests) -> None:
        if self._source is not None:
            self._source.begin(self._growth, requests, self._chained)
        elif self._tries is not None:
            roots = self._tries.roots(requests.index)
            start(self._growth, requests, roots, self._chained, self._stored_at)
        if self._tries is not None:
            self._growth.graft(self._tries.trie(requests.index))
        if self._source is not None:
            self._growth.pick(self._source.root_logits(len(requests.packed)))

    def forward(self, requests: Requests, number: int) -> bool:
        rows = self._draft.rows(len(requests.packed), self.widths[number])
        if self._growth.expand(rows.ancestor_bits) == 0 or not self._pays(self._growth):
            return False
        first, _ = expansions_of(self.widths, number + 1)
        self._growth.pick(self._draft.forward(rows, len(requests.packed), first))
        return True

    def finish(self, requests: Requests, forwards: int) -> torch.Tensor:
        return self._growth.finish(self._stored_at[: len(requests.packed)])

    def resume(self, requests: Requests, forwards: int) -> None:
        """Go on after so many forwards: for stages that are captured apart."""
        self._growth.resume(len(requests.packed), forwards)

    @property
    def _draft(self) -> NodeSource:
        if self._source is None:
            raise RuntimeError("without a draft model there is nothing to run")
        return self._source


class Eager:
    """A `Player` that runs the stages as they are."""

    def __init__(self, stages: DraftStages, requests: Requests) -> None:
        self._stages = stages
        self._requests = requests

    def catch_up(self, emitted: Emitted, target: TargetStates) -> None:
        self._stages.receive(emitted, target)
        self._stages.catch_up(self._requests, emitted)

    def root(self) -> None:
        self._stages.root(self._requests)

    def forward(self, number: int) -> bool:
        return self._stages.forward(self._requests, number)

    def finish(self, forwards: int) -> torch.Tensor:
        return self._stages.finish(self._requests, forwards)
