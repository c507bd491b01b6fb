"""Steps of drafting whose logits are those of a node's path, and trees checked by enumeration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from growth_steps import growth_of, memory_of

from dyntree_kernels.ancestors import unpack_bits
from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_kernels.paths import Paths
from dyntree_plugin.engine.cpu.ops import CPUOps
from dyntree_plugin.engine.step.growth_stages import DraftStages, Eager, Rank
from dyntree_plugin.engine.step.requests import COLUMNS, Requests
from dyntree_plugin.engine.step.rows import describe
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.drafting import grow
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class

Path = tuple[int, ...]

VOCAB, LAST, ROOT = 9, 60, 20
TEMPERATURES = (0.0, 0.7, 1.0, 1.3)
SLOTS = (2, 0, 3, 1)
"""Slots of the requests of a step."""


def logits_after(slot: int, path: Path) -> torch.Tensor:
    """Return the draft's logits of a request below ``path``, float32 [VOCAB]."""
    code = slot + 1
    for token in path:
        code = (code * 31 + token + 1) % 1_000_003
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(code))


class Source:
    """A `NodeSource`, and a `RowWriter`, whose logits depend on a node's path alone.

    ``drafts``: how many drafts grow a tree each. All of them say the same.
    """

    def __init__(self, plan: TreePlan, tries: Any) -> None:
        requests, width = len(SLOTS), max(plan.growing.widths)
        self.shift = plan.shape.shift
        rows, scratch = requests * width, plan.scratch_slots
        self.memory = memory_of(requests, rows, requests * scratch, LAST)
        self._roots = plan.growing.roots
        self._tries = tries
        self._words = -(-scratch // 32)
        self.ran: list[set[Path]] = []

    def begin(self, requests: Requests, chained: torch.Tensor) -> None:
        self._columns: list[list[Path]] = [[] for _ in SLOTS]
        self.ran = [{()} for _ in SLOTS]
        self._slots = requests.index.tolist()
        describe(requests, ROOT + requests.index, chained, self.memory.of_requests)

    def root_logits(self, requests: int) -> torch.Tensor:
        rows = [logits_after(slot, ()) for slot in self._slots]
        return torch.stack(rows).repeat_interleave(self._roots, dim=0)

    def rows(self, requests: int, width: int) -> Any:
        rows = requests * width
        bits = torch.zeros(rows, self._words, dtype=torch.int32)
        return SimpleNamespace(ids=self.memory.rows.ids[:rows], ancestor_bits=bits)

    def forward(self, rows: Any, requests: int, first: int) -> torch.Tensor:
        found, width = [], len(rows.ids) // requests
        tokens = rows.ids.tolist()
        for row, bits in enumerate(unpack_bits(rows.ancestor_bits, 32 * self._words).tolist()):
            columns = self._columns[row // width]
            above = [path for path, bit in zip(columns, bits, strict=False) if bit]
            path = (*max(above, key=len, default=()), tokens[row])
            if any(bits):
                self.ran[row // width].add(path)
            columns.append(path)
            found.append(logits_after(self._slots[row // width], path))
        return torch.stack(found)


def packed() -> torch.Tensor:
    found = torch.zeros(len(SLOTS), COLUMNS, dtype=torch.int64)
    found[:, 0] = index = torch.tensor(SLOTS)
    temperatures = torch.tensor(TEMPERATURES)[index]
    found[:, 5] = temperatures.view(torch.int32)
    found[:, 6] = 11 * index + 5
    found[:, 7] = temperature_class(temperatures)
    found[:, 8] = 1000
    return found


class Step:
    """One step's trees of a plan, ranked by ``rank``."""

    def __init__(self, plan: TreePlan, rank: Rank | None, tries: Any = None) -> None:
        self.plan = plan
        self.trees = TreeStore(len(SLOTS), plan, VOCAB, torch.device("cpu"))
        self.source = Source(plan, tries)
        chained = torch.zeros(len(SLOTS) + 1).bool()
        source: Any = self.source  # rows without metadata
        estimate = AcceptanceEstimate("cpu")
        stages = DraftStages(
            growth_of(CompiledGrowth, self.trees, self.source.memory, estimate),
            self.source.memory.of_requests,
            source=source,
            writer=source,
            tries=tries,
            widths=plan.growing.widths,
            max_depth=plan.shape.max_depth,
            chained=chained,
            pays=CPUOps().pays,
        )
        player = Eager(stages, Requests(packed(), self.trees.spare), rank)
        tokens, _ = grow(player, len(plan.growing.widths))
        self.tokens = dict(zip(SLOTS, tokens.tolist(), strict=True))

    def paths(self, slot: int) -> list[Path]:
        """Return the paths of a tree's nodes."""
        found: list[Path] = []
        for node in range(int(self.trees.counts[slot])):
            parent = int(self.trees.parents[slot, node])
            found.append((*(found[parent] if parent >= 0 else ()), self.tokens[slot][node]))
        return found

    def children(self, slot: int) -> dict[Path, list[int]]:
        """Return the tokens below each node that has children, the most valuable first."""
        found: dict[Path, list[int]] = {}
        for path in self.paths(slot):
            found.setdefault(path[:-1], []).append(path[-1])
        return found


def path_of(paths: Paths, row: int) -> Path:
    return tuple(paths.tokens[row, : int(paths.lengths[row])].tolist())
