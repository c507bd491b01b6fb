"""Steps of growth in compiled calls, and their comparison with growth on tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dyntree_kernels.contracts import GrowthSettings, RowBuffers
from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_plugin.engine.step.rows import PAD_SLOT
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import Children
from dyntree_plugin.tree.growth import Frontier, Growth, GrowthConfig
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import TokenTree
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class

VOCAB, GROUPS, MAX_MODEL_LEN = 70, 2, 64
STORED = ("parents", "depths", "values", "counts", "admitted", "grown", "ancestors", "features")


@dataclass(frozen=True)
class Case:
    """The requests of a step. ``room`` counts the scratch columns of each; some may be
    ``chained``."""

    shape: TreeShape
    seed: int = 0
    room: tuple[int, ...] = (40, 40)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    chained: tuple[bool, ...] = (False, False)
    least: float | None = None
    calibrated: bool = True

    @property
    def plan(self) -> TreePlan:
        growth = GrowthConfig(parameter=self.least)
        return TreePlan(self.shape, growth, "match", calibration=self.calibrated)

    @property
    def roots(self) -> torch.Tensor:
        return MAX_MODEL_LEN - 1 - torch.tensor(self.room)


class Step:
    """The compiled growth of one step, and the memory that it writes."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32, vocab: int = VOCAB) -> None:
        self.vocab = vocab
        self.case, self.plan = case, case.plan
        self.requests, self.widths = len(case.room), self.plan.growing.widths
        self.generator = torch.Generator().manual_seed(case.seed)
        self.dtype = dtype
        self.estimate = AcceptanceEstimate("cpu")
        self.estimate.weights += torch.rand(self.estimate.weights.shape, generator=self.generator)
        rows = self.requests * max((1, *self.widths))
        scratch = self.requests * max(1, sum(self.widths))
        self.rows = RowBuffers(
            torch.zeros(rows, dtype=torch.int32),
            torch.zeros(rows, dtype=torch.int64),
            torch.zeros(GROUPS, rows, dtype=torch.int64),
            1000 + torch.arange(GROUPS * scratch).view(GROUPS, scratch),
        )
        self.trees = TreeStore(self.requests, self.plan, VOCAB, torch.device("cpu"))
        self.temperatures = torch.tensor(case.temperatures)
        self.seeds = torch.arange(self.requests) + case.seed
        self.chained = torch.tensor(case.chained)
        self.growth = self.compiled()
        self.growth.start(
            case.roots,
            self.temperatures,
            temperature_class(self.temperatures),
            self.seeds,
            self.chained,
        )
        self.expanded = 0

    def compiled(self) -> CompiledGrowth:
        plan = self.plan
        return CompiledGrowth(
            GrowthSettings(
                requests=self.requests + 1,  # an engine's batch is rarely full
                node_budget=plan.shape.node_budget,
                children=plan.growing.children,
                widths=plan.growing.widths,
                least=plan.growth.parameter or 0.0,
                longest=MAX_MODEL_LEN - 1,
                coupled=plan.coupled,
                weights=self.estimate.weights if plan.calibrated else None,
                rows=self.rows,
                trees=self.trees.arrays,
            )
        )

    def logits(self, width: int) -> torch.Tensor:
        """Return random rows within wider ones, as of a padded vocabulary. Token 5 has chance 0."""
        made = torch.randn(self.requests * width, self.vocab + 3, generator=self.generator)
        # All values differ, also in 16 bits.
        made = made.argsort(dim=1) / 8 if self.dtype.itemsize == 2 else 3 * made
        made[:, 5] = float("-inf")
        return made.to(self.dtype)[:, : self.vocab]

    def pick(self, logits: torch.Tensor) -> Children:
        """Return the children that were picked below the last expansions, [R, W, K]."""
        self.growth.pick(logits)
        width = len(logits) // self.requests
        new = (slice(self.requests), slice(self.expanded, self.expanded + width))
        self.expanded += width
        picked = (self.growth.tokens, self.growth.edges, self.growth.features)
        tokens, edges, features = (torch.from_numpy(each[new].copy()) for each in picked)
        return Children(tokens, edges, None, features if self.plan.calibrated else None)

    def frontiers(self) -> Iterator[tuple[int, int]]:
        """Expand forward by forward; yield the width of each frontier, and its number of nodes."""
        for width in self.widths:
            words = self.growth._bits.shape[2]
            self.bits = torch.zeros(self.requests * width, words, dtype=torch.int32)
            yield width, self.growth.expand(self.bits)

    def finish(self) -> torch.Tensor:
        return self.growth.finish(torch.arange(self.requests))

    def tree(self, tokens: torch.Tensor) -> TokenTree:
        of_requests = slice(self.requests)
        stored = (self.trees.parents, self.trees.depths, self.trees.values, self.trees.counts)
        return TokenTree(tokens, *(each[of_requests] for each in stored))


def same_rows(step: Step, frontier: Frontier, first: int) -> None:
    """Check that the draft forward's rows are those of ``frontier``, in columns from ``first``."""
    valid, shape = frontier.valid, frontier.tokens.shape
    rows = frontier.tokens.numel()
    assert torch.equal(step.rows.ids[:rows].view(shape)[valid], frontier.tokens[valid].int())
    positions = (step.case.roots[:, None] + frontier.depths).clamp(max=MAX_MODEL_LEN - 1)
    assert torch.equal(step.rows.positions[:rows].view(shape)[valid], positions[valid])
    assert torch.equal(step.bits.view(frontier.ancestors.shape), frontier.ancestors)
    scratch = step.rows.scratch.view(GROUPS, step.requests, -1)[:, :, first : first + shape[1]]
    slots = scratch.masked_fill(~valid, PAD_SLOT)
    assert torch.equal(step.rows.slots[:, :rows], slots.flatten(1))
    assert frontier.values is not None
    assert torch.equal(step.growth.frontier_values, frontier.values)


def grow_both(step: Step, tensors: Growth) -> None:
    """Grow one step, and grow ``tensors`` from the same picks. Raise if they differ."""
    features = []

    def add(width: int) -> None:
        found = step.pick(step.logits(width))
        tensors.add(*found[:3])
        if found.features is not None:
            features.append(found.features.flatten(1, 2))

    add(1)
    for width, nodes in step.frontiers():
        frontier = tensors.frontier()
        assert nodes == int(frontier.valid.sum())
        same_rows(step, frontier, step.expanded - 1)
        if nodes == 0:
            break
        add(width)
    tokens, tree = step.finish(), tensors.finish()
    step.tree(tokens).check()
    assert torch.equal(tokens, tree.tokens)
    expected = TreeStore(step.requests, step.plan, VOCAB, torch.device("cpu"))
    slots = torch.arange(step.requests)
    expected.put(slots, tree, torch.cat(features, dim=1) if features else None)
    for name in STORED:
        assert torch.equal(getattr(step.trees, name), getattr(expected, name)), name


def tensor_growth(case: Case) -> Growth:
    return case.plan.growing.start(len(case.room), torch.tensor(case.room))


CASE = Case(TreeShape(node_budget=12, max_depth=4, width=3, children=4))
