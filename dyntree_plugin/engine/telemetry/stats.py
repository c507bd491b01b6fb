"""Counts of a scheduler's step, in vLLM's own channel for statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dyntree_plugin.engine.telemetry.counts import WorkerCounts
from dyntree_plugin.tree.step import SOURCES


@dataclass
class TreeSpecDecodingStats(SpecDecodingStats):
    """vLLM's counts of a scheduler step, and ours; travels in vLLM's own stats channel.

    ``tree_nodes``, ``tree_depths``, ``accepted_paths``: one entry per step of a decoding request,
    zeros where it had no node to verify. ``nodes_by_depth``, ``accepted_by_depth``,
    ``estimated_by_depth``: nodes at depth 1, 2, …: verified, accepted, and expected to be accepted.
    ``nodes_by_source``, ``accepted_by_source``, ``estimated_by_source``: the same by source.
    ``fallbacks``: request steps with a chain or no tree, by reason. ``grammar_seconds``: of each
    step that filled bitmasks. The rest is as in WorkerCounts.
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
    pruned: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
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
        """What the worker has counted of the step as a whole, and the scheduler's own times."""
        levels = counts.at_depth.shape[1]
        return cls(
            num_spec_tokens,
            num_accepted_tokens_per_pos=[0] * num_spec_tokens,
            num_draft_tokens_per_pos=[0] * num_spec_tokens,
            nodes_by_depth=[0] * levels,
            accepted_by_depth=[0] * levels,
            estimated_by_depth=[0.0] * levels,
            pruned=counts.pruned,
            draft_forwards=counts.draft_forwards,
            node_budget=counts.node_budget,
            stage_seconds=counts.stage_seconds,
            compared=counts.compared,
            grammar_seconds=[*grammar_seconds],
        )

    def observe_tree(self, counts: WorkerCounts, row: int, accepted: int) -> int:
        """Count the step of the decoding request in ``row``; the nodes that were verified, without
        which it has decoded plainly."""
        nodes = counts.nodes[row] if counts.nodes else 0
        if nodes:
            self.observe_draft(num_draft_tokens=nodes, num_accepted_tokens=accepted)
            self.kv_moved += counts.moved[row]
        self.tree_nodes.append(nodes)
        self.tree_depths.append(counts.depths[row] if nodes else 0)
        self.accepted_paths.append(accepted)
        for above in range(accepted):
            self.accepted_by_depth[above] += 1
        return nodes

    def observe_nodes(self, counts: WorkerCounts, rows: list[int]) -> None:
        """Count the nodes of the trees of requests in these ``rows``, by depth and by source."""
        nodes = counts.at_depth[rows].sum(axis=0).tolist()  # sync: host memory
        self.nodes_by_depth = [int(real) for real in nodes]
        self.estimated_by_depth = counts.expected[rows].sum(axis=0).tolist()  # sync: host memory
        self.nodes_by_source = _by_source(counts.of_source, rows)
        self.accepted_by_source = _by_source(counts.accepted_of_source, rows)
        self.estimated_by_source = _by_source(counts.expected_of_source, rows)

    def fall_back(self, reason: str) -> None:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1


def _by_source(columns: np.ndarray, rows: list[int]) -> dict[str, float]:
    """Add up some rows of ``columns`` [R, sources]."""
    sums = columns[rows].sum(axis=0).tolist()  # sync: host memory
    return dict(zip(SOURCES, sums, strict=True))
