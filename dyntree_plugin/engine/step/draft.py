"""Stage 5, draft: let the draft read what was emitted, then grow the next trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_kernels.contracts import StepGrowth
from dyntree_plugin.engine.step.catch_up import CatchUpPlan, most_emitted
from dyntree_plugin.engine.step.ops import Graphs, Player, TreeOps
from dyntree_plugin.engine.step.records import Drafted, Emitted, Step
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.rows import RowMemory
from dyntree_plugin.engine.step.source import NodeSource
from dyntree_plugin.engine.step.tensor_growth import TensorGrowth
from dyntree_plugin.tree.drafting import grow
from dyntree_plugin.tree.source import TrieSource


class DraftStages:
    """The stages of drafting as functions of the batch's requests.

    What passes from one to the next lies at fixed addresses, so each can be captured as a graph.
    """

    def __init__(
        self,
        source: NodeSource,
        tries: TrieSource | None,
        growth: StepGrowth,
        memory: RowMemory,
        widths: Sequence[int],
        chained: torch.Tensor,
        pays: Callable[[StepGrowth], bool],
    ) -> None:
        """Compose the sources of candidates with a growth.

        ``widths``: nodes of a request in each forward. ``chained`` bool [slots + 1]: requests whose
        trees are chains. ``pays``: as in `TreeOps`.

        Raises:
            ValueError: if a source brings ``tries`` and the growth takes none.
        """
        if tries is not None and not isinstance(growth, TensorGrowth):
            raise ValueError(f"{type(growth).__name__} takes no tries: growth in plain torch does")
        self.memory = memory
        self.widths = tuple(widths)
        self._source = source
        self._tries = tries
        self._growth = growth
        self._chained = chained
        self._pays = pays

    @property
    def resumable(self) -> bool:
        """Whether each stage can be captured by itself."""
        return not isinstance(self._growth, TensorGrowth)

    def catch_up(self, requests: Requests, emitted: Emitted) -> None:
        self._source.follow(requests, emitted)

    def catch_up_prompts(
        self,
        batch: InputBatch,
        plan: CatchUpPlan,
        emitted: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> None:
        """Catch up in a batch with prompts; it has no graph."""
        self._source.follow_prompts(batch, plan, emitted, num_sampled)

    def root(self, requests: Requests) -> None:
        self._source.begin(self._growth, requests, self._chained)
        self._graft(requests)
        self._growth.pick(self._source.root_logits(len(requests.packed)))

    def _graft(self, requests: Requests) -> None:
        """Add the nodes that need no forward, if there is a source of them."""
        if self._tries is None or not isinstance(self._growth, TensorGrowth):
            return
        roots = self.memory.root_positions[: len(requests.packed)]
        self._growth.graft(self._tries.trie(requests.index, roots), self._tries.kind)

    def forward(self, requests: Requests, number: int) -> bool:
        rows = self._source.rows(len(requests.packed), self.widths[number])
        if self._growth.expand(rows.ancestor_bits) == 0 or not self._pays(self._growth):
            return False
        self._growth.pick(self._source.forward(rows))
        return True

    def finish(self, requests: Requests, forwards: int) -> torch.Tensor:
        return self._growth.finish(self.memory.stored_at[: len(requests.packed)])

    def resume(self, requests: Requests, forwards: int) -> None:
        """Go on after so many forwards: for stages that are captured apart."""
        self._growth.resume(len(requests.packed), forwards)


class Eager:
    """A `Player` that runs the stages as they are."""

    def __init__(self, stages: DraftStages, requests: Requests) -> None:
        self._stages = stages
        self._requests = requests

    def catch_up(self, emitted: Emitted) -> None:
        self._stages.catch_up(self._requests, emitted)

    def root(self) -> None:
        self._stages.root(self._requests)

    def forward(self, number: int) -> bool:
        return self._stages.forward(self._requests, number)

    def finish(self, forwards: int) -> torch.Tensor:
        return self._stages.finish(self._requests, forwards)


class Drafter:
    """Drafts the trees that the next step verifies."""

    def __init__(
        self, stages: DraftStages, ops: TreeOps, graphs: Graphs, max_depth: int, spare: int
    ) -> None:
        """``max_depth``: levels of a tree. ``spare``: the trees' slot for padding requests."""
        self._stages = stages
        self._ops = ops
        self._graphs = graphs
        self._max_depth = max_depth
        self._spare = spare

    def draft(
        self,
        step: Step,
        packed: torch.Tensor,
        batch: InputBatch,
        num_sampled: torch.Tensor,
        last_sampled: torch.Tensor,
        *,
        grows: bool,
    ) -> Drafted:
        """Catch up, and grow a tree for each of R ``packed`` requests if the step ``grows`` any.

        ``num_sampled`` [R]: tokens that vLLM sampled; ``last_sampled`` [slots]: the last of them.
        """
        player = self._graphs.drafting(packed) or self._eager(packed)
        if step.verified is None:
            tokens = last_sampled[batch.idx_mapping].view(-1, 1)
        else:
            tokens = step.verified.tokens
        with self._ops.clock("catch_up"):
            if batch.is_prefilling_np[: batch.num_reqs].any():
                self._stages.catch_up_prompts(
                    batch, CatchUpPlan.of(batch, self._max_depth), tokens, num_sampled
                )
            else:
                player.catch_up(self._emitted(step, batch, tokens, num_sampled))
        if not grows:
            return Drafted(None, 1, None)
        with self._ops.clock("draft"):
            drafts, forwards = grow(player, self._most_forwards(step))
        return Drafted(drafts, 1 + forwards, forwards)

    def _eager(self, packed: torch.Tensor) -> Player:
        device = self._stages.memory.device
        requests = Requests(packed.to(device, non_blocking=True), self._spare)
        return Eager(self._stages, requests)

    def _emitted(
        self, step: Step, batch: InputBatch, tokens: torch.Tensor, num_sampled: torch.Tensor
    ) -> Emitted:
        """Describe what the requests of a batch without prompts got."""
        verified = step.verified
        if verified is None:
            roots = batch.positions[batch.query_start_loc[: batch.num_reqs].long()]
            return Emitted(roots, tokens, num_sampled, most=1)
        bound = int(most_emitted(batch, self._max_depth).max())
        most = self._ops.most_emitted(bound, verified.emitted)
        return Emitted(verified.positions, tokens, verified.emitted, most)

    def _most_forwards(self, step: Step) -> int:
        every = len(self._stages.widths)
        wanted = every if step.most_forwards is None else min(every, step.most_forwards)
        return max(wanted, self._graphs.fewest_forwards)
