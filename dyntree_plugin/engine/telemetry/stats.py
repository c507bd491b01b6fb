"""The counts of a scheduler's step, which vLLM sends with its statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dyntree_kernels.contracts import KINDS, report_places
from dyntree_plugin.engine.telemetry.counts import WorkerCounts
from dyntree_plugin.engine.telemetry.sources import by_source
from dyntree_plugin.metrics.names import BUDGET, PLAIN, SCHEDULER, TREE
from dyntree_plugin.tree.step import SOURCES


@dataclass
class TreeSpecDecodingStats(SpecDecodingStats):
    """vLLM's counts of a scheduler step, and ours.

    ``tree_nodes``, ``tree_depths``, ``accepted_paths``: one entry for each decoding request, 0 if
    it had no node to verify. ``nodes_by_depth``, ``accepted_by_depth``, ``estimated_by_depth``:
    verified, accepted and expected accepted nodes at depth 1, 2, …. ``nodes_by_source``,
    ``accepted_by_source``, ``estimated_by_source``: the same by source. Accepted nodes are those
    that were delivered: of a step's tokens, all but one. ``paths``: for requests with stop strings,
    indices in `SOURCES` of their accepted nodes. ``fallbacks``: requests with a chain or no tree,
    by reason. ``pruned``: nodes that were grown and not verified, by reason.
    ``grammar_seconds``: time of filling bitmasks. ``compared``: seconds of a step with
    trees, and the target's without trees for the delivered tokens. ``budgeted``: seconds of a step
    as the adaptive budget expected them, and as they were. The rest is as in WorkerCounts.
    """

    tree_nodes: list[int] = field(default_factory=list)
    tree_depths: list[int] = field(default_factory=list)
    accepted_paths: list[int] = field(default_factory=list)
    nodes_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    estimated_by_depth: list[float] = field(default_factory=list)
    nodes_by_source: dict[str, float] = field(default_factory=dict)
    accepted_by_source: dict[str, float] = field(default_factory=dict)
    estimated_by_source: dict[str, float] = field(default_factory=dict)
    paths: dict[str, list[int]] = field(default_factory=dict)
    pruned: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    replaced: dict[str, int] = field(default_factory=dict)
    kv_moved: int = 0
    draft_forwards: int = 0
    node_budget: int = 0
    stage_seconds: dict[str, list[float]] = field(default_factory=dict)
    grammar_seconds: list[float] = field(default_factory=list)
    compared: dict[str, float] = field(default_factory=dict)
    budgeted: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of_step(
        cls, num_spec_tokens: int, counts: WorkerCounts, grammar_seconds: Sequence[float] = ()
    ) -> TreeSpecDecodingStats:
        """Return the worker's counts of the whole step, with the scheduler's times."""
        return cls(
            num_spec_tokens,
            num_accepted_tokens_per_pos=[0] * num_spec_tokens,
            num_draft_tokens_per_pos=[0] * num_spec_tokens,
            replaced=counts.replaced,
            draft_forwards=counts.draft_forwards,
            node_budget=counts.node_budget,
            stage_seconds=counts.stage_seconds,
            grammar_seconds=[*grammar_seconds],
            budgeted={} if counts.budgeted is None else counts.budgeted._asdict(),
        )

    def observe_trees(self, counts: WorkerCounts, accepted: Mapping[int, int]) -> None:
        """Count the trees of the decoding requests: ``accepted`` nodes by row of the batch."""
        self.accepted_paths = [*accepted.values()]
        if counts.report is None:
            self.tree_nodes, self.tree_depths = [0] * len(accepted), [0] * len(accepted)
            return
        # This runs in every step, and each call of numpy's takes the host microseconds.
        columns = counts.report[[*accepted]]
        total, at = columns.sum(axis=0).tolist(), report_places(columns.shape[1])  # sync: host
        largest = columns[:, [at.verified, at.deepest]].astype(int)
        self.tree_nodes, self.tree_depths = largest.T.tolist()  # sync: host memory
        numbers = np.array((self.tree_nodes, self.accepted_paths))
        reached = np.arange(self.num_spec_tokens) < numbers[:, :, None]
        per_pos = reached.sum(axis=1).tolist()  # sync: host memory
        self.num_draft_tokens_per_pos, self.num_accepted_tokens_per_pos = per_pos
        self.num_drafts = self.num_draft_tokens_per_pos[0]
        self.num_draft_tokens, self.num_accepted_tokens = map(sum, per_pos)
        if counts.growth_forwards is not None:  # else slots hold earlier trees
            sizes = (int(total[each]) for each in (at.grown, at.admitted, at.verified))
            grown, offered, verified = sizes
            self.pruned = {BUDGET: grown - offered, SCHEDULER: offered - verified}
        self.nodes_by_depth = [*map(int, total[at.at_depth])]
        self.estimated_by_depth = total[at.expected]
        levels = len(self.nodes_by_depth)
        self.accepted_by_depth = self.num_accepted_tokens_per_pos[:levels]
        kinds = columns[:, at.accepted_kinds][reached[1, :, :levels]].astype(int)
        delivered = np.bincount(kinds, minlength=KINDS).tolist()  # sync: host memory
        self.accepted_by_source = by_source(delivered)
        self.nodes_by_source = by_source(total[at.of_kind])
        self.estimated_by_source = by_source(total[at.expected_of_kind])
        self.kv_moved = int(total[at.moved])

    def cut(self, request_id: str, surplus: int) -> None:
        """Take back the last ``surplus`` accepted nodes of a request, which were not delivered."""
        path = self.paths.pop(request_id, [])
        kept = max(len(path) - surplus, 0)
        if kept == len(path):
            return
        self.accepted_paths.remove(len(path))
        self.accepted_paths.append(kept)
        self.num_accepted_tokens -= len(path) - kept
        for depth in range(kept, len(path)):
            self.num_accepted_tokens_per_pos[depth] -= 1
            self.accepted_by_depth[depth] -= 1
            self.accepted_by_source[SOURCES[path[depth]]] -= 1

    def compare(self, tree: float, plain: float) -> None:
        """Count the seconds of a step, and the target's without trees for its tokens."""
        if tree:
            self.compared[TREE] = self.compared.get(TREE, 0.0) + tree
            self.compared[PLAIN] = self.compared.get(PLAIN, 0.0) + plain


@dataclass
class DeliveredMetrics(RequestSpecDecodeMetrics):
    """vLLM's metrics of one request, which count verified nodes and delivered tokens in place of
    slots and sampled tokens."""

    def observe(self, *args: object, **kwargs: object) -> None:
        """Ignore vLLM's counts: slots for nodes, and tokens that it later cuts off at the end."""

    count = RequestSpecDecodeMetrics.observe
