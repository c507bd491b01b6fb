"""The counts of a scheduler's step, which vLLM sends with its statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dyntree_plugin.engine.telemetry.counts import WorkerCounts
from dyntree_plugin.engine.telemetry.sources import by_source, source_indices
from dyntree_plugin.metrics.names import PLAIN, TREE
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
    by reason. ``grammar_seconds``: time of filling bitmasks. ``compared``: seconds of a step with
    trees, and the target's without trees for the delivered tokens. The rest is as in WorkerCounts.
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
    stage_seconds: dict[str, float] = field(default_factory=dict)
    grammar_seconds: list[float] = field(default_factory=list)
    compared: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of_step(
        cls, num_spec_tokens: int, counts: WorkerCounts, grammar_seconds: Sequence[float] = ()
    ) -> TreeSpecDecodingStats:
        """Return the worker's counts of the whole step, with the scheduler's times."""
        return cls(
            num_spec_tokens,
            num_accepted_tokens_per_pos=[0] * num_spec_tokens,
            num_draft_tokens_per_pos=[0] * num_spec_tokens,
            pruned=counts.pruned,
            replaced=counts.replaced,
            draft_forwards=counts.draft_forwards,
            node_budget=counts.node_budget,
            stage_seconds=counts.stage_seconds,
            grammar_seconds=[*grammar_seconds],
        )

    def observe_trees(self, counts: WorkerCounts, accepted: Mapping[int, int]) -> None:
        """Count the trees of the decoding requests: ``accepted`` nodes by row of the batch."""
        rows, self.accepted_paths = [*accepted], [*accepted.values()]
        report = counts.report
        if report is None:
            self.tree_nodes, self.tree_depths = [0] * len(rows), [0] * len(rows)
            return
        self.tree_nodes = report.verified[rows].astype(int).tolist()  # sync: host memory
        self.tree_depths = report.deepest[rows].astype(int).tolist()  # sync: host memory
        self.kv_moved = int(report.moved[rows].sum())
        for nodes, path in zip(self.tree_nodes, self.accepted_paths, strict=True):
            if nodes:
                self.observe_draft(num_draft_tokens=nodes, num_accepted_tokens=path)
        levels = np.arange(report.accepted_kinds.shape[1])
        delivered = levels < np.array(self.accepted_paths)[:, None]
        sources = np.where(delivered, source_indices(report.accepted_kinds[rows]), -1)
        self.accepted_by_depth = delivered.sum(axis=0).tolist()  # sync: host memory
        # Those that were not delivered come first.
        by_index = np.bincount(1 + sources.ravel(), minlength=1 + len(SOURCES))[1:]
        self.accepted_by_source = dict(zip(SOURCES, by_index.tolist(), strict=True))  # sync: host
        by_depth = report.at_depth[rows].sum(axis=0).astype(int)
        self.nodes_by_depth = by_depth.tolist()  # sync: host memory
        self.estimated_by_depth = report.expected[rows].sum(axis=0).tolist()  # sync: host memory
        self.nodes_by_source = by_source(report.of_kind[rows])
        self.estimated_by_source = by_source(report.expected_of_kind[rows])

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

    def fall_back(self, reason: str) -> None:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1


@dataclass
class DeliveredMetrics(RequestSpecDecodeMetrics):
    """vLLM's metrics of one request, but for verified nodes and delivered tokens."""

    def observe(self, *args: object, **kwargs: object) -> None:
        """Ignore vLLM's counts: slots for nodes, and tokens that it later cuts off at the end."""

    count = RequestSpecDecodeMetrics.observe
