"""One step of growth on any device, from the requests, logits and tries of a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from random_tries import random_trie
from reference.best_first import BestFirst

from dyntree_kernels.ancestors import unpack_bits
from dyntree_kernels.contracts import Drawing, GrowthSettings, RequestParams, RowBuffers, StepGrowth
from dyntree_kernels.cpu.gumbel import perturbed_logits
from dyntree_kernels.tries import Trie
from dyntree_plugin.engine.drawn.store import DrawStore
from dyntree_plugin.engine.papers.tensor_growth import TensorGrowth
from dyntree_plugin.engine.step.rows import GrowthMemory
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import ChildPicker
from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import Exactness, TreeShape
from dyntree_plugin.tree.token_tree import TokenTree
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class

VOCAB, GROUPS, LAST, SLOTS = 300, 2, 89, 4
LAW_SIZE = 10
"""Few, since most of the time of Triton's interpreter goes to finding them."""
OF_TRIES = 5
"""Tokens of tries. The draft favours them as well, so that it often proposes a trie's nodes."""
STORED = (
    *("parents", "depths", "values", "counts", "admitted", "grown", "ancestors", "features"),
    *("kinds", "forwards"),
)
CPU = torch.device("cpu")

Kind = Callable[[GrowthSettings], StepGrowth]


def growth_of(
    kind: Kind | None,
    trees: TreeStore,
    memory: GrowthMemory,
    estimate: AcceptanceEstimate,
    drawing: Drawing | None = None,
) -> Any:
    """Return a growth of ``kind`` that writes to ``trees`` and ``memory``; None: the oracle."""
    plan, shape = trees.plan, trees.plan.shape
    if plan.growing.start is not None:
        return TensorGrowth(trees, ChildPicker(plan, perturbed_logits, estimate), memory)
    settings = GrowthSettings(
        of_requests=memory.of_requests,
        node_budget=shape.node_budget,
        children=plan.growing.children,
        widths=plan.growing.widths,
        least=plan.growth.parameter or 0.0,
        longest=memory.last_position,
        coupled=plan.coupled,
        weights=estimate.weights if plan.calibrated else None,
        rows=memory.rows,
        trees=trees.arrays,
        grafts=shape.grafts,
        max_depth=shape.max_depth,
        shift=shape.shift,
        drawing=drawing,
    )
    return (kind or BestFirst)(settings)


def memory_of(
    requests: int,
    rows: int,
    columns: int,
    last: int,
    *,
    groups: int = 1,
    device: torch.device = CPU,
) -> GrowthMemory:
    """Return memory for so many rows of draft forwards, over ``columns`` scratch columns."""
    numbers = torch.zeros(rows, dtype=torch.int64, device=device)
    scratch = torch.arange(groups * columns, device=device).view(groups, columns)
    slots = numbers.expand(groups, -1).clone()
    rows_of = RowBuffers(numbers.int(), numbers.clone(), slots, 1000 + scratch, numbers.clone())
    return GrowthMemory(RequestParams.room(requests, device), rows_of, last)


@dataclass(frozen=True)
class Case:
    """The requests of a step: ``room`` counts the scratch columns of each; some are ``chained``.

    ``noise`` is added to their seeds. ``levels``: as in `RequestParams`. ``draws``: whether trees
    are drawn at a temperature above 0, or chains if they are small.
    """

    shape: TreeShape
    seed: int = 0
    room: tuple[int, ...] = (80, 80)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    chained: tuple[int, ...] = ()
    least: float | None = None
    calibrated: bool = True
    dtype: torch.dtype = torch.float32
    vocab: int = VOCAB
    noise: int = 0
    levels: tuple[int, ...] | None = None
    draws: bool = False

    @property
    def plan(self) -> TreePlan:
        growth = GrowthConfig(parameter=self.least)
        exactness: Exactness = "distribution" if self.draws else "tokens"
        return TreePlan(
            self.shape, growth, "match", calibration=self.calibrated, exactness=exactness
        )

    @property
    def requests(self) -> int:
        return len(self.room)

    def logits(self) -> list[torch.Tensor]:
        """Return the logits of every draft forward, within wider rows. Token 5 has chance 0."""
        generator = torch.Generator().manual_seed(self.seed)
        made = []
        for width in (1, *self.plan.growing.widths):
            each = torch.randn(self.requests * width, self.vocab + 3, generator=generator)
            # All values differ, also in 16 bits.
            each = each.argsort(dim=1) / 8 if self.dtype.itemsize == 2 else 3 * each
            if self.shape.grafts and self.dtype.itemsize > 2:
                each[:, :OF_TRIES] += 10
                each /= 2
            each[:, 5] = float("-inf")
            made.append(each.to(self.dtype)[:, : self.vocab])
        return made

    def trie(self) -> Trie:
        """Return the tries of the requests."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        trie = random_trie(generator, self.requests, self.shape.grafts, real=0.98, vocab=OF_TRIES)
        return trie._replace(evidence=trie.evidence + 3)


@dataclass
class Forward:
    """The inputs of a draft forward. Rows without a node have the slot -1."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    above: torch.Tensor
    bits: torch.Tensor
    values: torch.Tensor


class Step:
    """The growth of one step, and the memory that it writes."""

    def __init__(self, case: Case, kind: Kind | None = None, device: torch.device = CPU) -> None:
        """``kind`` None: the oracle."""
        self.case, self.plan, self.device = case, case.plan, device
        generator = torch.Generator().manual_seed(case.seed)
        self.estimate = AcceptanceEstimate(device)
        random = torch.rand(self.estimate.weights.shape, generator=generator)
        self.estimate.weights += random.to(device)
        self.widths = self.plan.growing.widths
        # An engine's batch is rarely full.
        rows, columns = SLOTS * max((1, *self.widths)), SLOTS * max(1, sum(self.widths))
        self.memory = memory_of(SLOTS, rows, columns, LAST, groups=GROUPS, device=device)
        self.trees = TreeStore(SLOTS, self.plan, case.vocab, device)
        self.draws, drawing = None, None
        if self.plan.draws:
            self.draws = DrawStore(SLOTS, self.plan, case.vocab, device, LAW_SIZE)
            drawing = self.draws.drawing(chains=not self.plan.drawn_trees)
        self.growth = growth_of(kind, self.trees, self.memory, self.estimate, drawing)
        self.slots = torch.tensor([2, 0, 1], device=device)[: case.requests]

    def start(self) -> Step:
        case, temperatures = self.case, torch.tensor(self.case.temperatures)
        chained = torch.zeros(case.requests, dtype=torch.bool)
        chained[list(case.chained)] = True
        seeds = torch.arange(case.requests) + case.seed + case.noise
        levels = torch.tensor(case.levels or [LAST] * case.requests)
        roots, classes = LAST - torch.tensor(case.room), temperature_class(temperatures)
        given = RequestParams(roots, temperatures, classes, seeds, chained, levels, self.slots)
        self.memory.of_requests.fill(given)
        self.growth.start(case.requests)
        self.forwards: list[Forward] = []
        return self

    def graft(self, trie: Trie | None = None) -> Step:
        trie = self.case.trie() if trie is None else trie
        self.growth.graft(Trie(*(part.to(self.device) for part in trie)))
        return self

    def pick(self, logits: torch.Tensor) -> None:
        self.growth.pick(logits.to(self.device))

    def expand(self, width: int) -> None:
        """Expand, and keep the inputs of the draft forward."""
        rows, words = self.case.requests * width, max(1, -(-sum(self.widths) // 32))
        bits = torch.zeros(rows, words, dtype=torch.int32, device=self.device)
        nodes = self.growth.expand(bits)
        ids, positions, slots, _, above = (x[..., :rows].cpu().clone() for x in self.memory.rows)
        values = self.growth.frontier_values.cpu().clone()
        self.forwards.append(Forward(ids, positions, slots, above, bits.cpu(), values))
        assert nodes is None or nodes == int((slots[0] >= 0).sum())

    def finish(self) -> Step:
        self.tokens = self.growth.finish().cpu()
        return self

    def run(
        self,
        logits: list[torch.Tensor] | None = None,
        forwards: int | None = None,
        *,
        apart: bool = False,
    ) -> Step:
        """Grow with so many ``forwards``, by default all.

        ``apart``: calls run as if captured one by one, so that growth may end after any forward.
        """
        first, *others = self.case.logits() if logits is None else logits
        widths = self.widths[:forwards]
        self.start()
        if self.case.shape.grafts:
            self.graft()
        self.pick(first)
        for at, (width, of_forward) in enumerate(zip(widths, others, strict=False)):
            if apart:
                self.resume(at)
            self.expand(width)
            self.pick(of_forward)
        if apart:
            self.resume(len(widths))
        return self.finish()

    def resume(self, forwards: int) -> None:
        """Do as a replayed graph does, whose calls ran for other forwards in between."""
        self.growth.resume(1, len(self.widths))
        self.growth.resume(self.case.requests, forwards)

    def alone(self) -> Step:
        """Make trees of the tries alone, without a draft."""
        return self.start().graft().finish()

    def tree(self) -> TokenTree:
        names = ("parents", "depths", "values", "counts")
        stored = (getattr(self.trees, name)[self.slots].cpu() for name in names)
        return TokenTree(self.tokens, *stored)

    def stored(self, name: str) -> torch.Tensor:
        return getattr(self.trees, name).cpu()

    def kinds(self) -> set[int]:
        """Return the kinds of all nodes of the step's trees."""
        there = self.tree().values > float("-inf")
        return {*self.stored("kinds")[self.slots.cpu()][there].tolist()}


def same_forwards(ours: list[Forward], others: list[Forward], *, shifted: bool) -> None:
    """Raise unless draft forwards get the same rows. ``shifted``: they read their parents' rows."""
    assert len(ours) == len(others)
    for own, other in zip(ours, others, strict=True):
        assert torch.equal(own.slots, other.slots)
        exists = own.slots[0] >= 0
        assert torch.equal(own.ids[exists], other.ids[exists])
        assert torch.equal(own.positions[exists], other.positions[exists])
        assert torch.equal(own.bits, other.bits)
        assert not shifted or torch.equal(own.above, other.above)
        torch.testing.assert_close(own.values, other.values, atol=1e-4, rtol=1e-4)


def same_trees(ours: Step, other: Step) -> None:
    """Raise unless both have stored the same trees, and the same of every node."""
    ours.tree().check()
    assert torch.equal(ours.tokens, other.tokens)
    exists = ours.stored("values") > float("-inf")
    for name in STORED:
        one, two = ours.stored(name), other.stored(name)
        if (
            name in ("kinds", "features") and one.numel()
        ):  # where there is no node, nobody reads them
            one, two = one[exists], two[exists]
        if name == "features" and one.numel():
            # The logit of a chance near 1 depends on the chance's last digits.
            one, two = (torch.minimum(each, torch.tensor([8, 20])) for each in (one, two))
            torch.testing.assert_close(one, two, atol=2e-2, rtol=1e-4)
        elif one.is_floating_point():
            torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-4)
        else:
            assert torch.equal(one, two), name


def same(ours: Step, other: Step) -> None:
    same_forwards(ours.forwards, other.forwards, shifted=ours.case.shape.head)
    same_trees(ours, other)


def runs_parents(step: Step) -> bool:
    """Return whether a forward runs both a node and its child, which then sees it."""
    first = 0
    for width, forward in zip(step.widths, step.forwards, strict=True):
        seen = unpack_bits(forward.bits, sum(step.widths))[:, first : first + width]
        if (seen.sum(dim=1) > 1).any():
            return True
        first += width
    return False
