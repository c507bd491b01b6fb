"""Growth on the device grows the trees of growth on tensors, from the same logits.

It runs on a GPU or in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from paged_cases import DEVICE

pytest.importorskip("numba", reason="it compares with the CPU's kernels, which need numba")

from dyntree_kernels.contracts import GrowthSettings, OfRequests, RowBuffers, TreeArrays
from dyntree_kernels.cpu.gumbel import perturbed_logits
from dyntree_kernels.cuda.growth import DeviceGrowth
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import ChildPicker, DraftRows
from dyntree_plugin.tree.growth import Frontier, GrowthConfig
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class

GROUPS, LONGEST = 2, 63
TEMPERATURES = torch.tensor([0.0, 0.7, 1.3])


@dataclass(frozen=True)
class Case:
    """Three requests: the ``room`` of scratch columns of each, and whether it is chained."""

    shape: TreeShape
    room: tuple[int, ...] = (40, 40, 40)
    chained: tuple[bool, ...] = (False, False, False)
    least: float | None = None
    calibrated: bool = True
    vocab: int = 70
    seed: int = 0

    @property
    def plan(self) -> TreePlan:
        growth = GrowthConfig(parameter=self.least)
        return TreePlan(self.shape, growth, "match", calibration=self.calibrated)


class Both:
    """One step of growth by the kernels and on tensors, and the memory that the kernels write."""

    def __init__(self, case: Case) -> None:
        self.case, self.plan = case, case.plan
        self.requests, widths = len(case.room), self.plan.growing.widths
        self.estimate = AcceptanceEstimate("cpu")
        self.estimate.weights += torch.rand_like(self.estimate.weights)
        rows, scratch = self.requests * max(1, *widths, 1), self.requests * max(1, sum(widths))
        self.rows = RowBuffers(
            torch.zeros(rows, dtype=torch.int32, device=DEVICE),
            torch.zeros(rows, dtype=torch.int64, device=DEVICE),
            torch.zeros(GROUPS, rows + 3, dtype=torch.int64, device=DEVICE),
            1000 + torch.arange(GROUPS * scratch, device=DEVICE).view(GROUPS, scratch),
            torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        )
        self.trees = TreeStore(self.requests, self.plan, case.vocab, DEVICE)
        self.roots = LONGEST - torch.tensor(case.room)
        self.seeds = torch.arange(self.requests) + case.seed
        self.tensors = self.plan.growing.start(self.requests, torch.tensor(case.room))
        self.room = OfRequests.room(self.requests + 1, torch.device(DEVICE))
        settings = GrowthSettings(
            of_requests=self.room,
            node_budget=case.shape.node_budget,
            children=self.plan.growing.children,
            widths=widths,
            least=case.least or 0.0,
            longest=LONGEST,
            coupled=self.plan.coupled,
            weights=self.estimate.weights.to(DEVICE) if self.plan.calibrated else None,
            rows=self.rows,
            trees=TreeArrays(*(getattr(self.trees, name) for name in TreeArrays._fields)),
            grafts=0,
            max_depth=case.shape.max_depth,
            shift=case.shape.shift,
        )
        self.growth = DeviceGrowth(settings)

    def start(self) -> None:
        self.features: list[torch.Tensor] = []
        classes, chained = temperature_class(TEMPERATURES), torch.tensor(self.case.chained)
        self.of_requests = (TEMPERATURES, classes, self.seeds, chained)
        far = torch.full_like(self.roots, LONGEST)
        slots = torch.arange(self.requests)
        self.room.fill(OfRequests(self.roots, *self.of_requests, far, slots))
        self.growth.start(self.requests)

    def add(self, positions: torch.Tensor) -> None:
        """Add the children of rows at ``positions`` [R, W] to both."""
        logits = 3 * torch.randn(positions.numel(), self.case.vocab)
        logits[:, 5] = float("-inf")
        self.growth.pick(logits.to(DEVICE))
        rows = [each.repeat_interleave(positions.shape[1]) for each in self.of_requests]
        flat = positions.flatten()
        pick = ChildPicker(self.plan, perturbed_logits, self.estimate)
        found = pick(logits, DraftRows(*rows, flat, flat), all_greedy=False)
        found = found.by_request(self.requests)
        self.tensors.add(*found[:3])
        if found.features is not None:
            self.features.append(found.features.flatten(1, 2))

    def grow(self, forwards: int | None = None, *, apart: bool = False) -> None:
        """Grow both with so many forwards, and raise if they differ.

        With ``apart``, calls run as if captured one by one, so that growth may end after any
        forward.
        """
        self.start()
        self.add(self.roots[:, None])
        every = self.plan.growing.widths
        widths = every[:forwards]
        for at, (width, end) in enumerate(zip(widths, accumulate(widths), strict=True)):
            if apart:
                self.growth.resume(1, len(every))
                self.growth.resume(self.requests, at)
            words = -(-sum(every) // 32)
            bits = torch.zeros(self.requests * width, words, dtype=torch.int32, device=DEVICE)
            self.growth.expand(bits)
            frontier = self.tensors.frontier()
            self.same_rows(frontier, bits.cpu(), end - width)
            self.add((self.roots[:, None] + frontier.depths).clamp(max=LONGEST))
        if apart:
            self.growth.resume(1, len(every))
            self.growth.resume(self.requests, len(widths))
        slots = torch.tensor([2, 0, 1])
        tokens, tree = self.growth.finish(slots.to(DEVICE)).cpu(), self.tensors.finish()
        assert torch.equal(tokens, tree.tokens)
        expected = TreeStore(self.requests, self.plan, self.case.vocab, torch.device("cpu"))
        expected.put(slots, tree, torch.cat(self.features, dim=1) if self.features else None)
        for name in ("parents", "depths", "counts", "admitted", "grown", "ancestors", "forwards"):
            got, wanted = getattr(self.trees, name)[:3].cpu(), getattr(expected, name)[:3]
            assert torch.equal(got, wanted), name
        there = expected.values[:3] > float("-inf")
        for name in ("values", *(["features"] if self.plan.calibrated else [])):
            got, wanted = getattr(self.trees, name)[:3].cpu(), getattr(expected, name)[:3]
            torch.testing.assert_close(got[there], wanted[there], atol=1e-3, rtol=1e-4)
        assert (self.trees.values[:3].cpu()[~there] == float("-inf")).all()

    def same_rows(self, frontier: Frontier, bits: torch.Tensor, first: int) -> None:
        valid, shape = frontier.valid, frontier.tokens.shape
        count = frontier.tokens.numel()
        ids, positions, slots = (each.cpu() for each in self.rows[:3])
        assert torch.equal(ids[:count].view(shape)[valid], frontier.tokens[valid].int())
        at = (self.roots[:, None] + frontier.depths).clamp(max=LONGEST)
        shift = self.plan.shape.shift
        assert torch.equal(positions[:count].view(shape)[valid], at[valid] + shift)
        if shift:
            first_above = torch.arange(self.requests)[:, None] * self.growth._expansions
            above = self.rows.above[:count].cpu().view(shape)
            assert torch.equal(above, first_above + frontier.above)
        assert torch.equal(bits.view(frontier.ancestors.shape), frontier.ancestors)
        scratch = self.rows.scratch.cpu().view(GROUPS, self.requests, -1)
        own = scratch[:, :, first : first + shape[1]].masked_fill(~valid, -1)
        assert torch.equal(slots[:, :count], own.flatten(1))
        assert frontier.values is not None
        got = self.growth.frontier_values.cpu()
        torch.testing.assert_close(got, frontier.values, atol=1e-3, rtol=1e-4)


CASE = Case(TreeShape(node_budget=12, max_depth=4, width=3, children=4))
CASES = {
    "usual": CASE,
    "not calibrated": replace(CASE, calibrated=False),
    "not coupled": replace(CASE, shape=replace(CASE.shape, coupling=False)),
    "chained": replace(CASE, chained=(True, False, True)),
    "little room": replace(CASE, room=(40, 2, 0)),
    "a least value": replace(CASE, least=0.05),
    "several blocks of vocabulary": replace(CASE, vocab=5000),
    "one child": Case(TreeShape(node_budget=3, max_depth=5, width=1, children=1)),
    "no forward": Case(TreeShape(node_budget=3, max_depth=1, width=1, children=3)),
    "a head": replace(CASE, shape=replace(CASE.shape, head=True)),
    "a head in little room": replace(
        CASE, shape=replace(CASE.shape, head=True), room=(40, 2, 0), chained=(True, False, False)
    ),
    "wide": Case(TreeShape(node_budget=40, max_depth=6, width=7, children=5)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_logits_grow_the_same_trees(name: str) -> None:
    torch.manual_seed(3)
    both = Both(CASES[name])
    both.grow()
    if name == "usual":  # A step leaves nothing that changes the next one.
        both.tensors = both.plan.growing.start(both.requests, torch.tensor(both.case.room))
        both.grow()


@pytest.mark.parametrize(
    "other",
    [
        replace(CASE, shape=replace(CASE.shape, node_budget=11)),
        replace(CASE, room=(40, 2, 40)),
        replace(CASE, least=0.2),
    ],
)
def test_another_growth_would_be_told_apart(other: Case) -> None:
    torch.manual_seed(3)
    both = Both(CASE)
    both.tensors = other.plan.growing.start(3, torch.tensor(other.room))
    with pytest.raises((AssertionError, RuntimeError)):
        both.grow()


@pytest.mark.parametrize("forwards", [0, 2])
def test_growth_may_end_behind_any_forward_and_be_captured_apart(forwards: int) -> None:
    torch.manual_seed(3)
    both = Both(CASE)
    both.grow(apart=True)
    both.tensors = both.plan.growing.start(both.requests, torch.tensor(both.case.room))
    both.grow(forwards, apart=True)
    assert both.trees.depths[:3].max() == 1 + forwards


@pytest.mark.parametrize("forwards", [0, 3])
def test_an_end_behind_another_forward_is_told_apart(forwards: int) -> None:
    torch.manual_seed(3)
    both = Both(CASE)
    both.grow()
    both.tensors = both.plan.growing.start(both.requests, torch.tensor(both.case.room))
    stock = both.growth.finish

    def finish(slots: torch.Tensor) -> torch.Tensor:
        both.growth.resume(both.requests, forwards)
        return stock(slots)

    both.growth.finish = finish  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        both.grow(1)


@pytest.mark.parametrize("vocab", [CASE.vocab, 5000])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("whole", [True, False])
def test_a_row_without_a_distribution_has_no_children(
    broken: float, whole: bool, vocab: int
) -> None:
    both = Both(replace(CASE, vocab=vocab))
    both.start()
    logits = torch.randn(3, vocab)
    logits[0, slice(None) if broken < 0 or whole else 7] = broken
    both.growth.pick(logits.to(DEVICE))
    tokens, _, _, features = both.growth.candidates
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert features.isfinite().all()
    both.growth.finish()
    assert both.trees.counts.tolist()[:3] == [0, 4, 4]


def test_rows_without_a_distribution_grow_the_trees_of_the_tensors() -> None:
    both = Both(CASE)
    stock, rows = torch.randn, 0

    def randn(*shape: int) -> torch.Tensor:
        nonlocal rows
        logits, rows = stock(*shape), rows + shape[0]
        if len(shape) == 2 and rows > 3:
            logits[::2, 11] = float("nan")
            logits[1] = float("-inf")
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", randn)
        both.grow()
    assert (both.trees.counts[:3] > 4).any()


def test_logits_of_another_number_of_rows_are_refused() -> None:
    both = Both(CASE)
    both.start()
    with pytest.raises(ValueError, match="logits of 4 rows"):
        both.growth.pick(torch.zeros(4, CASE.vocab, device=DEVICE))
