"""Steps of growth on the device, and their comparison with the CPU and with tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from paged_cases import DEVICE
from random_tries import random_trie

from dyntree_kernels.ancestors import unpack_bits
from dyntree_kernels.contracts import GrowthSettings, OfRequests, RowBuffers, TreeArrays
from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_kernels.cuda.growth import DeviceGrowth
from dyntree_kernels.tries import Trie
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import Children
from dyntree_plugin.tree.growth import Frontier, GrowthConfig
from dyntree_plugin.tree.growth.topk import TopKGrowth
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import NO_VALUE as NONE
from dyntree_plugin.tree.token_tree import TokenTree
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class

VOCAB, GROUPS, MAX_MODEL_LEN, SLOTS = 300, 2, 90, 4
OF_TRIES = 5
"""Tokens of tries. The draft favours them as well, so that it often proposes a trie's nodes."""
STORED = (
    *("parents", "depths", "values", "counts", "admitted", "grown", "ancestors", "features"),
    *("kinds", "forwards"),
)


@dataclass(frozen=True)
class Case:
    """The requests of a step: ``room`` counts the scratch columns of each; some are ``chained``.

    ``noise`` is added to their seeds. ``levels``: as in `OfRequests`.
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

    @property
    def plan(self) -> TreePlan:
        growth = GrowthConfig(parameter=self.least)
        return TreePlan(self.shape, growth, "match", calibration=self.calibrated)

    @property
    def requests(self) -> int:
        return len(self.room)

    @property
    def roots(self) -> torch.Tensor:
        return MAX_MODEL_LEN - 1 - torch.tensor(self.room)

    def logits(self) -> list[torch.Tensor]:
        """Return the logits of every draft forward, within wider rows. Token 5 has chance 0."""
        generator = torch.Generator().manual_seed(self.seed)
        widths = (1, *self.plan.growing.widths)
        made = []
        for width in widths:
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
    """The inputs of a draft forward. Rows without a node have the slot -1. ``above`` is None unless
    rows are shifted: they do not read it."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    bits: torch.Tensor
    values: torch.Tensor
    above: torch.Tensor | None


class Picked(NamedTuple):
    """Children of one forward's nodes, and the log chances of a trie's nodes after it, [R, T]."""

    children: Children
    judged: torch.Tensor | None


class Step:
    """The growth of one step by ``kind``, and the memory that it writes."""

    def __init__(
        self, case: Case, kind: type[DeviceGrowth | CompiledGrowth], device: torch.device
    ) -> None:
        self.case, self.plan, self.device = case, case.plan, device
        generator = torch.Generator().manual_seed(case.seed)
        self.estimate = AcceptanceEstimate(device)
        random = torch.rand(self.estimate.weights.shape, generator=generator)
        self.estimate.weights += random.to(device)
        self.widths = self.plan.growing.widths
        rows = SLOTS * max((1, *self.widths))
        scratch = GROUPS, SLOTS * max(1, sum(self.widths))
        self.rows = RowBuffers(
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(GROUPS, rows, dtype=torch.int64, device=device),
            1000 + torch.arange(scratch[0] * scratch[1], device=device).view(scratch),
            torch.zeros(rows, dtype=torch.int64, device=device),
        )
        self.trees = TreeStore(SLOTS, self.plan, case.vocab, device)
        self.room = OfRequests.room(SLOTS, device)
        settings = GrowthSettings(
            of_requests=self.room,
            node_budget=case.shape.node_budget,
            children=self.plan.growing.children,
            widths=self.widths,
            least=case.least or 0.0,
            longest=MAX_MODEL_LEN - 1,
            coupled=self.plan.coupled,
            weights=self.estimate.weights if self.plan.calibrated else None,
            rows=self.rows,
            trees=TreeArrays(*(getattr(self.trees, name) for name in TreeArrays._fields)),
            grafts=case.shape.grafts,
            max_depth=case.shape.max_depth,
            shift=case.shape.shift,
        )
        self.growth = kind(settings)
        self.slots = torch.arange(case.requests, device=device) + 1

    def start(self) -> None:
        case, temperatures = self.case, torch.tensor(self.case.temperatures)
        chained = torch.zeros(case.requests, dtype=torch.bool)
        chained[list(case.chained)] = True
        seeds = torch.arange(case.requests) + case.seed + case.noise
        self.of_requests = (temperatures, temperature_class(temperatures), seeds, chained)
        levels = torch.tensor(case.levels or [MAX_MODEL_LEN] * case.requests)
        self.room.fill(OfRequests(case.roots, *self.of_requests, levels, self.slots))
        self.growth.start(case.requests)
        self.trie: Trie | None = None
        if case.shape.grafts:
            trie = case.trie()
            self.growth.graft(Trie(*(part.to(self.device) for part in trie)))
            self.trie = trie._replace(exists=trie.exists & ~chained[:, None])
            self.first_edges = self._edges()

    def run(self, logits: list[torch.Tensor] | None = None) -> Step:
        """Grow, and keep the inputs of draft forwards, and the children picked from their
        logits."""
        first, *others = logits or self.case.logits()
        self.forwards: list[Forward] = []
        self.picks: list[Picked] = []
        self.start()
        self._pick(first, 0)
        words, columns = max(1, -(-sum(self.widths) // 32)), 0
        for width, of_forward in zip(self.widths, others, strict=True):
            rows = self.case.requests * width
            bits = torch.zeros(rows, words, dtype=torch.int32, device=self.device)
            self.growth.expand(bits)
            ids, positions, slots, _, above = (x[..., :rows].cpu().clone() for x in self.rows)
            values = self.growth.frontier_values.cpu().clone()
            read = above if self.case.shape.head else None
            self.forwards.append(Forward(ids, positions, slots, bits.cpu(), values, read))
            self._pick(of_forward, 1 + columns)
            columns += width
        self.tokens = self.growth.finish().cpu()
        return self

    def alone(self) -> Step:
        """Make trees of the tries alone, without a draft."""
        self.start()
        self.tokens = self.growth.finish().cpu()
        return self

    def _pick(self, logits: torch.Tensor, first: int) -> None:
        """Keep the device's picks."""
        self.growth.pick(logits.to(self.device))
        if isinstance(self.growth, DeviceGrowth):
            self.picks.append(self._picked(self.growth, first, len(logits) // self.case.requests))

    def _picked(self, growth: DeviceGrowth, first: int, width: int) -> Picked:
        """Return the picks of expansions from ``first`` on, with log probabilities in float64.

        In float64, their sums with the values of their parents are the children's values again.
        """
        requests, grafts = slice(self.case.requests), self.case.shape.grafts
        new = requests, slice(first, first + width)

        def drafted(of_candidates: torch.Tensor) -> torch.Tensor:
            of_draft = of_candidates[:, grafts:]
            return of_draft.unflatten(1, (-1, self.plan.growing.children))[new].cpu()

        values = drafted(growth.candidates.values).double()
        bases = growth._bases[new][:, :, None].cpu()
        children = Children(
            drafted(growth.candidates.tokens),
            torch.where(values > NONE, values - bases, NONE),
            None,
            drafted(growth.candidates.features) if self.case.calibrated else None,
        )
        return Picked(children, self._edges())

    def _edges(self) -> torch.Tensor | None:
        """Return the log chances of the nodes of tries on the device, [R, T]."""
        growth = self.growth
        if not isinstance(growth, DeviceGrowth) or growth._grafts.edges is None:
            return None
        return growth._grafts.edges[: self.case.requests].cpu().clone()

    @property
    def seen(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Features and kinds of all candidates of the device, as far as it keeps them."""
        requests, growth = slice(self.case.requests), self.growth
        assert isinstance(growth, DeviceGrowth)
        kinds = growth._grafts.kinds
        return (
            growth.candidates.features[requests].cpu() if self.case.calibrated else None,
            None if kinds is None else kinds[requests].cpu(),
        )

    def tree(self) -> TokenTree:
        names = ("parents", "depths", "values", "counts")
        stored = (getattr(self.trees, name)[self.slots].cpu() for name in names)
        return TokenTree(self.tokens, *stored)

    def stored(self, name: str) -> torch.Tensor:
        return getattr(self.trees, name).cpu()


def on_device(case: Case) -> Step:
    return Step(case, DeviceGrowth, DEVICE)


def on_cpu(case: Case) -> Step:
    return Step(case, CompiledGrowth, torch.device("cpu"))


@cache
def grown(case: Case) -> Step:
    return on_device(case).run()


CASE = Case(TreeShape(node_budget=12, max_depth=4, width=3, children=4))


def same_forwards(ours: list[Forward], others: list[Forward]) -> None:
    for own, other in zip(ours, others, strict=True):
        assert torch.equal(own.slots, other.slots)
        assert torch.equal(own.ids, other.ids)
        assert torch.equal(own.positions, other.positions)
        assert torch.equal(own.bits, other.bits)
        assert (own.above is None) == (other.above is None)
        if own.above is not None and other.above is not None:
            assert torch.equal(own.above, other.above)
        torch.testing.assert_close(own.values, other.values, atol=1e-5, rtol=1e-5)


def same_trees(ours: Step, other: Step) -> None:
    ours.tree().check()
    assert torch.equal(ours.tokens, other.tokens)
    for name in STORED:
        one, two = ours.stored(name), other.stored(name)
        if one.is_floating_point():
            atol = 2e-2 if name == "features" else 1e-4
            if name == "features":
                # The logit of a chance near 1 depends on the chance's last digits.
                one, two = (torch.minimum(each, torch.tensor([8, 20])) for each in (one, two))
            torch.testing.assert_close(one, two, atol=atol, rtol=1e-4)
        else:
            assert torch.equal(one, two), name


def same(ours: Step, theirs: Step) -> None:
    same_forwards(ours.forwards, theirs.forwards)
    same_trees(ours, theirs)


def grow_tensors(step: Step) -> TopKGrowth:
    """Grow tensors from the picks of ``step``, and raise if they expand other nodes."""
    case = step.case
    tensors = case.plan.growing.start(case.requests, torch.tensor(case.room))
    assert isinstance(tensors, TopKGrowth)
    if case.levels is not None:
        tensors.limit(torch.tensor(case.levels))
    if step.trie is not None and step.first_edges is not None:
        tensors.graft(step.trie, step.first_edges, whole_paths=not case.shape.head)
    for at, (children, judged) in enumerate(step.picks):
        if at > 0:
            expansions = 1 + sum(step.widths)
            same_frontier(step.forwards[at - 1], tensors.frontier(), expansions)
        tensors.add(children.tokens, children.log_probs, judged=judged)
    return tensors


def same_frontier(forward: Forward, frontier: Frontier, expansions: int) -> None:
    assert frontier.values is not None
    assert torch.equal(forward.values, frontier.values)
    valid = frontier.valid.flatten()
    assert torch.equal(forward.slots >= 0, valid.expand(GROUPS, -1))
    assert torch.equal(forward.ids[valid], frontier.tokens.flatten()[valid].int())
    assert torch.equal(forward.bits, frontier.ancestors.flatten(0, 1))
    if forward.above is not None:
        requests = torch.arange(len(frontier.above))[:, None]
        assert torch.equal(forward.above, (requests * expansions + frontier.above).flatten())


def runs_parents(step: Step) -> bool:
    """Return whether a forward runs both a node and its child, which then sees it."""
    first = 0
    for width, forward in zip(step.widths, step.forwards, strict=True):
        seen = unpack_bits(forward.bits, sum(step.widths))[:, first : first + width]
        if (seen.sum(dim=1) > 1).any():
            return True
        first += width
    return False


def same_as_tensors(step: Step) -> None:
    """Raise unless the trees of ``step`` are those of the tensors from the same picks."""
    case, tree = step.case, grow_tensors(step).finish()
    assert torch.equal(step.tokens, tree.tokens)
    expected = TreeStore(SLOTS, case.plan, case.vocab, torch.device("cpu"))
    expected.put(step.slots.cpu(), tree, *step.seen)
    for stored in STORED:
        assert torch.equal(step.stored(stored), getattr(expected, stored)), stored
