"""A block draft as a source of candidates: one forward proposes tokens for several positions.

Its forward runs the root and a mask for each of the next positions, and what it says of a position
depends on no node, or on the node before it alone. DDTree (arXiv 2604.12989) grows trees from the
product of the positions' probabilities.
"""

from __future__ import annotations

from typing import Protocol

import torch

from dyntree_plugin.engine.step.catch_up import CatchUp
from dyntree_plugin.engine.step.records import Emitted, TargetStates
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.rows import RowMemory, TreeRows


class BlockReader(Protocol):
    """Runs a block draft: what it reads of a text, and the blocks after the roots.

    ``receive``, ``follow`` and ``follow_prompts`` are those of a `NodeSource`, and so is ``shift``.
    """

    @property
    def shift(self) -> int: ...
    def receive(self, emitted: Emitted, target: TargetStates) -> None: ...
    def follow(self, requests: Requests, emitted: Emitted) -> None: ...
    def follow_prompts(self, step: CatchUp) -> None: ...

    def offer(self, requests: int) -> tuple[torch.Tensor, ...]:
        """Return what `score` makes the logits of the positions after the roots from, each with
        R * length entries."""
        ...

    def score(self, tokens: torch.Tensor | None, *offered: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] after ``tokens`` [N] from N entries of what was offered.

        ``tokens``: None for the roots.
        """
        ...


class BlockDraft:
    """The `NodeSource` that looks up the logits of a block.

    Growth's rows are those of nodes, which no model runs. What a step's blocks offer, mostly
    logits [R, length, V], is as large as what vLLM's own chains compute, and is freed with the next
    step's.
    """

    def __init__(self, reader: BlockReader, memory: RowMemory, length: int) -> None:
        """``length``: positions after the root that a block gives logits for."""
        self.reader = reader
        self._memory = memory
        self._length = length
        self.kept: tuple[torch.Tensor, ...] = ()

    @property
    def shift(self) -> int:
        return self.reader.shift

    def receive(self, emitted: Emitted, target: TargetStates) -> None:
        """Copy what the draft reads of the target's hidden states."""
        self.reader.receive(emitted, target)

    def follow(self, requests: Requests, emitted: Emitted) -> None:
        """Read the emitted tokens, the last of which are the new roots; all requests decode."""
        self.reader.follow(requests, emitted)

    def follow_prompts(self, step: CatchUp) -> None:
        """Do as `follow` where some requests are in their prompt, whose chunks are read as well."""
        self.reader.follow_prompts(step)

    def root_logits(self, requests: int) -> torch.Tensor:
        """Return the logits of the first positions after the roots, [R, V]."""
        shape = requests, self._length
        offered = self.reader.offer(requests)
        self.kept = tuple(each.reshape(shape + each.shape[1:]) for each in offered)
        return self.reader.score(None, *(each[:, 0] for each in self.kept))

    def forward(self, rows: TreeRows, requests: int, first: int) -> torch.Tensor:
        """Return the logits of the position after each node, [R * width, V]."""
        roots = self._memory.root_positions[:requests, None]
        depths = rows.positions.view(requests, -1) - roots
        blocks = torch.arange(requests, device=depths.device)[:, None] * self._length
        at = (blocks + depths.clamp(min=0, max=self._length - 1)).flatten()
        of_rows = (each.flatten(0, 1).index_select(0, at) for each in self.kept)
        return self.reader.score(rows.ids, *of_rows)
