"""Steps of growth in compiled calls, and their comparison with growth on tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from random_tries import FAVOURED, random_trie

from dyntree_kernels.ancestors import unpack_bits
from dyntree_kernels.contracts import GrowthSettings, OfRequests, RowBuffers
from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_kernels.tries import Trie
from dyntree_plugin.engine.step.rows import PAD_SLOT
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import Children
from dyntree_plugin.tree.growth import Frontier, Growth, GrowthConfig
from dyntree_plugin.tree.growth.topk import TopKGrowth
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import TokenTree
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class

VOCAB, GROUPS, MAX_MODEL_LEN = 70, 2, 64
STORED = (
    *("parents", "depths", "values", "counts", "admitted", "grown", "ancestors", "features"),
    *("kinds", "forwards"),
)


@dataclass(frozen=True)
class Case:
    """The requests of a step. ``room`` counts the scratch columns of each; some may be
    ``chained``. ``grafts``: nodes of each request's trie. ``levels``: as in `OfRequests`."""

    shape: TreeShape
    seed: int = 0
    room: tuple[int, ...] = (40, 40)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    chained: tuple[bool, ...] = (False, False)
    least: float | None = None
    calibrated: bool = True
    grafts: int = 0
    levels: tuple[int, ...] | None = None

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
            torch.zeros(rows, dtype=torch.int64),
        )
        self.trees = TreeStore(self.requests, self.plan, VOCAB, torch.device("cpu"))
        self.temperatures = torch.tensor(case.temperatures)
        self.seeds = torch.arange(self.requests) + case.seed
        self.chained = torch.tensor(case.chained)
        # An engine's batch is rarely full.
        self.of_requests = OfRequests.room(self.requests + 1, torch.device("cpu"))
        self.growth = self.compiled()
        self.start()

    def start(self) -> None:
        """Start the step's growth, and graft its trie."""
        given = OfRequests(
            self.case.roots,
            self.temperatures,
            temperature_class(self.temperatures),
            self.seeds,
            self.chained,
            torch.tensor(self.case.levels or [MAX_MODEL_LEN] * self.requests),
            torch.arange(self.requests),
        )
        self.of_requests.fill(given)
        self.growth.start(self.requests)
        self.trie: Trie | None = None
        if self.case.grafts:
            self.trie = random_trie(self.generator, self.requests, self.case.grafts)
            self.growth.graft(self.trie)
        self.expanded, self.ran_parents = 0, False

    def compiled(self) -> CompiledGrowth:
        plan = self.plan
        return CompiledGrowth(
            GrowthSettings(
                of_requests=self.of_requests,
                node_budget=plan.shape.node_budget,
                children=plan.growing.children,
                widths=plan.growing.widths,
                least=plan.growth.parameter or 0.0,
                longest=MAX_MODEL_LEN - 1,
                coupled=plan.coupled,
                weights=self.estimate.weights if plan.calibrated else None,
                rows=self.rows,
                trees=self.trees.arrays,
                grafts=self.case.grafts,
                max_depth=plan.shape.max_depth,
                shift=plan.shape.shift,
            )
        )

    def logits(self, width: int) -> torch.Tensor:
        """Return random rows within wider ones, as of a padded vocabulary. Token 5 has chance 0."""
        made = torch.randn(self.requests * width, self.vocab + 3, generator=self.generator)
        # All values differ, also in 16 bits.
        made = made.argsort(dim=1) / 8 if self.dtype.itemsize == 2 else 3 * made
        if self.case.grafts and self.dtype.itemsize > 2:
            made[:, :FAVOURED] += 2
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

    @property
    def edges_of_grafts(self) -> torch.Tensor:
        """The log chances of the trie's nodes, [R, T]; -inf for nodes that do not exist."""
        return torch.from_numpy(self.growth._grafts.edges[: self.requests].copy())

    def kinds(self, picks: list[Children]) -> torch.Tensor:
        """Return the kinds of all candidates after these picks, [R, C]."""
        grafts = self.growth._grafts
        widths = [each.tokens.shape[1] for each in picks]
        below = torch.from_numpy(grafts.beside[: self.requests, : sum(widths)])
        of_drafts = below.repeat_interleave(self.plan.growing.children, dim=1)
        own = torch.from_numpy(grafts.kinds[: self.requests])
        return torch.cat([own, of_drafts], dim=1)

    def features_of_grafts(self) -> torch.Tensor:
        return torch.from_numpy(self.growth._grafts.features[: self.requests].copy())

    def frontiers(self) -> Iterator[tuple[int, int]]:
        """Expand forward by forward; yield the width of each frontier, and its number of nodes."""
        for width in self.widths:
            words = self.growth._bits.shape[2]
            self.bits = torch.zeros(self.requests * width, words, dtype=torch.int32)
            yield width, self.growth.expand(self.bits)

    def finish(self) -> torch.Tensor:
        return self.growth.finish()

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
    positions += step.plan.shape.shift
    assert torch.equal(step.rows.positions[:rows].view(shape)[valid], positions[valid])
    of_requests = torch.arange(step.requests)[:, None] * (1 + sum(step.widths))
    assert torch.equal(step.rows.above[:rows].view(shape), of_requests + frontier.above)
    assert torch.equal(step.bits.view(frontier.ancestors.shape), frontier.ancestors)
    scratch = step.rows.scratch.view(GROUPS, step.requests, -1)[:, :, first : first + shape[1]]
    slots = scratch.masked_fill(~valid, PAD_SLOT)
    assert torch.equal(step.rows.slots[:, :rows], slots.flatten(1))
    assert frontier.values is not None
    assert torch.equal(step.growth.frontier_values, frontier.values)


def runs_parents(step: Step, width: int) -> bool:
    """Return whether the forward runs both a node and its child, which then sees it."""
    first = step.expanded - 1
    seen = unpack_bits(step.bits, sum(step.widths))[:, first : first + width]
    return bool((seen.sum(dim=1) > 1).any())


def grow_both(step: Step, tensors: Growth) -> None:
    """Grow one step, and grow ``tensors`` from the same picks. Raise if they differ."""
    picks: list[Children] = []
    graft(step, tensors)

    def add(width: int) -> None:
        picks.append(step.pick(step.logits(width)))
        add_picks(step, tensors, picks[-1])

    add(1)
    for width, nodes in step.frontiers():
        frontier = tensors.frontier()
        assert nodes == int(frontier.valid.sum())
        same_rows(step, frontier, step.expanded - 1)
        step.ran_parents |= runs_parents(step, width)
        if nodes == 0:
            break
        add(width)
    same_trees(step, tensors, picks)


def graft(step: Step, tensors: Growth) -> None:
    """Graft the step's trie, if it has one, with the chances that compiled growth gave it."""
    if step.trie is not None:
        assert isinstance(tensors, TopKGrowth)
        real = step.trie.exists & ~step.chained[:, None]
        whole_paths = not step.plan.shape.head
        tensors.graft(step.trie._replace(exists=real), step.edges_of_grafts, whole_paths)


def add_picks(step: Step, tensors: Growth, found: Children) -> None:
    """Add children that compiled growth has picked, and its judgement of the trie."""
    if step.trie is None:
        tensors.add(*found[:3])
        return
    assert isinstance(tensors, TopKGrowth)
    tensors.add(found.tokens, found.log_probs, judged=step.edges_of_grafts)


def same_trees(step: Step, tensors: Growth, picks: list[Children]) -> None:
    """Finish both growths; raise if the trees, or what is learned from them, differ."""
    features = [each.features.flatten(1, 2) for each in picks if each.features is not None]
    if step.trie is not None and step.plan.calibrated:
        features = [step.features_of_grafts(), *features]
    tokens, tree = step.finish(), tensors.finish()
    step.tree(tokens).check()
    assert torch.equal(tokens, tree.tokens)
    expected = TreeStore(step.requests, step.plan, VOCAB, torch.device("cpu"))
    slots = torch.arange(step.requests)
    kinds = None if step.trie is None else step.kinds(picks)
    expected.put(slots, tree, torch.cat(features, dim=1) if features else None, kinds)
    for name in STORED:
        assert torch.equal(getattr(step.trees, name), getattr(expected, name)), name


def tensor_growth(case: Case) -> Growth:
    growth = case.plan.growing.start(len(case.room), torch.tensor(case.room))
    if case.levels is not None:
        assert isinstance(growth, TopKGrowth)
        growth.limit(torch.tensor(case.levels))
    return growth


CASE = Case(TreeShape(node_budget=12, max_depth=4, width=3, children=4))
