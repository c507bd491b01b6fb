"""Counts of a step on their way from the worker over the scheduler to whoever serves metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dyntree_plugin.engine.timing import STAGES

if TYPE_CHECKING:
    from dyntree_plugin.engine.verifier import Verification

ATTRIBUTE = "dyntree"
"""Where a ModelRunnerOutput carries the worker's counts."""


@dataclass(frozen=True)
class WorkerCounts:
    """One step's counts. Lists are by request of the batch; without drafts they are empty.

    ``nodes``, ``depths``, ``moved``: nodes verified, depth of the deepest, KV rows moved.
    ``by_depth``: nodes of all trees at depth 1, 2, …
    """

    nodes: list[int]
    depths: list[int]
    moved: list[int]
    by_depth: list[int]
    draft_forwards: int
    stage_seconds: dict[str, float]


class StepRecord:
    """What the worker notes of a step; becomes WorkerCounts when the output is fetched."""

    def __init__(self) -> None:
        self.draft_forwards = 0
        self.stage_seconds: dict[str, float] = {}
        self._tensors: tuple[torch.Tensor, ...] | None = None

    def verified(self, verification: Verification, depths: torch.Tensor) -> None:
        """Note a verification; ``depths`` int64 [R, N] are those of all node slots."""
        counts = verification.counts
        nodes = torch.arange(depths.shape[1], device=depths.device)
        depths = torch.where(nodes < counts[:, None], depths, 0)
        levels = torch.arange(1, verification.accepted.path.shape[1] + 1, device=depths.device)
        path = verification.accepted.path
        moved = ((path >= 0) & (path != levels - 1)).sum(dim=1)
        by_depth = (depths[:, :, None] == levels).sum(dim=(0, 1))
        self._tensors = (counts, depths.amax(dim=1), moved, by_depth)

    def counts(self) -> WorkerCounts:
        tensors = self._tensors or (torch.empty(0, dtype=torch.int64),) * 4
        # The output is fetched after the step.
        nodes, depths, moved, by_depth = (x.tolist() for x in tensors)  # sync: for the host
        return WorkerCounts(nodes, depths, moved, by_depth, self.draft_forwards, self.stage_seconds)


class CountedOutput(AsyncModelRunnerOutput):
    """The runner's output together with the counts of its step."""

    def __init__(self, output: AsyncModelRunnerOutput, record: StepRecord) -> None:
        self._output = output
        self._record = record

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        setattr(output, ATTRIBUTE, self._record.counts())
        return output


@dataclass
class TreeSpecDecodingStats(SpecDecodingStats):
    """vLLM's counts of a scheduler step, and ours; travels in vLLM's own stats channel.

    ``tree_nodes``, ``tree_depths``, ``accepted_paths``: one entry per verified tree.
    ``nodes_by_depth``: nodes at depth 1, 2, … ``fallbacks``: request steps without a free tree,
    by reason.
    """

    tree_nodes: list[int] = field(default_factory=list)
    tree_depths: list[int] = field(default_factory=list)
    accepted_paths: list[int] = field(default_factory=list)
    nodes_by_depth: list[int] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    kv_moved: int = 0
    draft_forwards: int = 0
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def observe_tree(self, nodes: int, depth: int, accepted: int, moved: int) -> None:
        """Count one verified tree; the accepted tokens beyond ``nodes`` cannot be."""
        if nodes:
            self.observe_draft(num_draft_tokens=nodes, num_accepted_tokens=accepted)
        self.tree_nodes.append(nodes)
        self.tree_depths.append(depth)
        self.accepted_paths.append(accepted)
        self.kv_moved += moved

    def fall_back(self, reason: str) -> None:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1

    def observe_worker(self, counts: WorkerCounts) -> None:
        """Count what belongs to the step as a whole."""
        missing = len(counts.by_depth) - len(self.nodes_by_depth)
        self.nodes_by_depth.extend([0] * missing)
        for depth, nodes in enumerate(counts.by_depth):
            self.nodes_by_depth[depth] += nodes
        self.draft_forwards += counts.draft_forwards
        for stage, seconds in counts.stage_seconds.items():
            self.stage_seconds[stage] += seconds
