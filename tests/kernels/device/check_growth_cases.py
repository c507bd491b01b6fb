"""Growth on the device in many cases, on a GPU or in Triton's interpreter.

Its trees are those of growth on the CPU. From the same picks, they are those of growth on tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from paged_cases import DEVICE

pytest.importorskip("numba", reason="it compares with the CPU's kernels, which need numba")

from dyntree_kernels.contracts import GrowthSettings, RowBuffers, TreeArrays
from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_kernels.cpu.gumbel import perturbed_logits
from dyntree_kernels.cuda.growth import DeviceGrowth
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import ChildPicker, Children, DraftRows
from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import NO_VALUE as NONE
from dyntree_plugin.tree.token_tree import TokenTree
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class

VOCAB, GROUPS, MAX_MODEL_LEN, SLOTS = 300, 2, 90, 4
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of -inf and NaN
STORED = ("parents", "depths", "values", "counts", "admitted", "grown", "ancestors", "features")


@dataclass(frozen=True)
class Case:
    """The requests of a step: ``room`` counts the scratch columns of each; some are ``chained``."""

    shape: TreeShape
    seed: int = 0
    room: tuple[int, ...] = (80, 80)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    chained: tuple[int, ...] = ()
    least: float | None = None
    calibrated: bool = True
    dtype: torch.dtype = torch.float32
    vocab: int = VOCAB

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
            each[:, 5] = float("-inf")
            made.append(each.to(self.dtype)[:, : self.vocab])
        return made


@dataclass
class Forward:
    """The inputs of a draft forward. Rows without a node have the slot -1."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    bits: torch.Tensor
    values: torch.Tensor


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
        )
        self.trees = TreeStore(SLOTS, self.plan, case.vocab, device)
        settings = GrowthSettings(
            requests=SLOTS,
            node_budget=case.shape.node_budget,
            children=self.plan.growing.children,
            widths=self.widths,
            least=case.least or 0.0,
            longest=MAX_MODEL_LEN - 1,
            coupled=self.plan.coupled,
            weights=self.estimate.weights if self.plan.calibrated else None,
            rows=self.rows,
            trees=TreeArrays(*(getattr(self.trees, name) for name in TreeArrays._fields)),
        )
        self.growth = kind(settings)
        self.slots = torch.arange(case.requests, device=device) + 1

    def start(self) -> None:
        case, temperatures = self.case, torch.tensor(self.case.temperatures)
        chained = torch.zeros(case.requests, dtype=torch.bool)
        chained[list(case.chained)] = True
        seeds = torch.arange(case.requests) + case.seed
        self.of_requests = (temperatures, temperature_class(temperatures), seeds, chained)
        self.growth.start(*(x.to(self.device) for x in (case.roots, *self.of_requests)))

    def run(self, logits: list[torch.Tensor] | None = None) -> Step:
        """Grow, and keep the inputs of draft forwards, and the children picked from their
        logits."""
        first, *others = logits or self.case.logits()
        self.forwards: list[Forward] = []
        self.picks: list[Children] = []
        self.start()
        self._pick(first, 0)
        words, columns = max(1, -(-sum(self.widths) // 32)), 0
        for width, of_forward in zip(self.widths, others, strict=True):
            rows = self.case.requests * width
            bits = torch.zeros(rows, words, dtype=torch.int32, device=self.device)
            self.growth.expand(bits)
            ids, positions, slots, _ = (x[..., :rows].cpu().clone() for x in self.rows)
            values = self.growth.frontier_values.cpu().clone()
            self.forwards.append(Forward(ids, positions, slots, bits.cpu(), values))
            self._pick(of_forward, 1 + columns)
            columns += width
        self.tokens = self.growth.finish(self.slots).cpu()
        return self

    def _pick(self, logits: torch.Tensor, first: int) -> None:
        """Keep the device's picks, with log probabilities in float64.

        In float64, their sums with the values of their parents are the children's values again.
        """
        growth, width = self.growth, len(logits) // self.case.requests
        growth.pick(logits.to(self.device))
        if isinstance(growth, DeviceGrowth):
            new = (slice(self.case.requests), slice(first, first + width))
            values = growth.values.view(growth.tokens.shape)[new].double()
            edges = torch.where(values > NONE, values - growth._bases[new][:, :, None], NONE)
            features = growth.features[new].cpu() if self.case.calibrated else None
            self.picks.append(Children(growth.tokens[new].cpu(), edges.cpu(), None, features))

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
LARGE = replace(CASE, shape=TreeShape(node_budget=34, max_depth=5, width=9, children=3))
TIGHT = replace(CASE, shape=TreeShape(node_budget=6, max_depth=4, width=5, children=4))
CASES = {
    "small": CASE,
    "several words of bits": LARGE,
    "most nodes are not in the tree": TIGHT,
    "another": replace(CASE, seed=1, temperatures=(1.0, 0.3)),
    "no room": replace(CASE, room=(2, 0)),
    "chained": replace(CASE, chained=(1,)),
    "least value": replace(CASE, least=0.05),
    "uncalibrated": replace(CASE, calibrated=False),
    "uncalibrated and chained, with a least value": replace(
        LARGE, calibrated=False, chained=(0,), least=1e-4, room=(80, 20)
    ),
    "one child": replace(CASE, shape=TreeShape(5, max_depth=5, width=1, children=1)),
    "only the root is expanded": replace(CASE, shape=TreeShape(3, 1, width=2, children=4)),
    "more room than candidates": replace(CASE, shape=TreeShape(40, 2, width=2, children=3)),
    "uncoupled": replace(CASE, shape=replace(CASE.shape, coupling=False)),
    "many blocks": replace(CASE, vocab=5000),
}


OF_16_BITS = {
    "bfloat16": replace(CASE, dtype=torch.bfloat16, vocab=200),
    "float16": replace(CASE, dtype=torch.float16),
}


def same_forwards(ours: list[Forward], others: list[Forward]) -> None:
    for own, other in zip(ours, others, strict=True):
        assert torch.equal(own.slots, other.slots)
        assert torch.equal(own.ids, other.ids)
        assert torch.equal(own.positions, other.positions)
        assert torch.equal(own.bits, other.bits)
        torch.testing.assert_close(own.values, other.values, atol=1e-5, rtol=1e-5)


def same_trees(ours: Step, other: Step) -> None:
    ours.tree().check()
    assert torch.equal(ours.tokens, other.tokens)
    for name in STORED:
        one, two = ours.stored(name), other.stored(name)
        if one.is_floating_point():
            # The logit of a chance near 1 depends on the chance's last digits.
            atol = 2e-2 if name == "features" else 1e-4
            torch.testing.assert_close(one, two, atol=atol, rtol=1e-4)
        else:
            assert torch.equal(one, two), name


def same(ours: Step, theirs: Step) -> None:
    same_forwards(ours.forwards, theirs.forwards)
    same_trees(ours, theirs)


@pytest.mark.parametrize("name", CASES)
def test_the_trees_are_those_of_the_cpus_growth(name: str) -> None:
    same(grown(CASES[name]), on_cpu(CASES[name]).run())


@pytest.mark.parametrize(
    "other",
    [
        replace(CASE, shape=replace(CASE.shape, node_budget=11)),
        replace(CASE, room=(80, 2)),
        replace(CASE, least=0.2),
        replace(CASE, chained=(0,)),
        replace(CASE, temperatures=(0.0, 0.6)),
        replace(CASE, seed=1),
    ],
)
def test_another_growth_would_be_told_apart(other: Case) -> None:
    """Control of the test above."""
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        same(grown(CASE), on_cpu(other).run())


@pytest.mark.parametrize("name", CASES)
def test_the_same_picks_grow_the_trees_of_the_tensors_growth(name: str) -> None:
    case = CASES[name]
    step, tensors = grown(case), case.plan.growing.start(case.requests, torch.tensor(case.room))
    tensors.add(*step.picks[0][:3])
    for forward, picks in zip(step.forwards, step.picks[1:], strict=True):
        frontier = tensors.frontier()
        assert frontier.values is not None
        assert torch.equal(forward.values, frontier.values)
        valid = frontier.valid.flatten()
        assert torch.equal(forward.slots >= 0, valid.expand(GROUPS, -1))
        assert torch.equal(forward.ids[valid], frontier.tokens.flatten()[valid].int())
        assert torch.equal(forward.bits, frontier.ancestors.flatten(0, 1))
        tensors.add(*picks[:3])
    tree = tensors.finish()
    assert torch.equal(step.tokens, tree.tokens)
    expected = TreeStore(SLOTS, case.plan, case.vocab, torch.device("cpu"))
    seen = [x.features.flatten(1, 2) for x in step.picks if x.features is not None]
    expected.put(step.slots.cpu(), tree, torch.cat(seen, dim=1) if seen else None)
    for stored in STORED:
        assert torch.equal(step.stored(stored), getattr(expected, stored)), stored


def picked_by_tensors(
    step: Step, estimate: AcceptanceEstimate, logits: torch.Tensor, positions: torch.Tensor
) -> Children:
    pick = ChildPicker(step.plan, perturbed_logits, estimate)
    width = len(logits) // step.case.requests
    of_rows = (each.repeat_interleave(width) for each in step.of_requests)
    rows = DraftRows(*of_rows, positions, positions)
    return pick(logits, rows, all_greedy=False).by_request(step.case.requests)


@pytest.mark.parametrize(
    "name", ["small", "chained", "uncalibrated", "uncoupled", "many blocks", *OF_16_BITS]
)
def test_the_picks_are_the_pickers(name: str) -> None:
    case = (CASES | OF_16_BITS)[name]
    case = replace(case, shape=replace(case.shape, node_budget=60))
    step = on_device(case)
    step.estimate.weights[:, 0] -= 1  # the kernels use learned weights
    estimate = AcceptanceEstimate("cpu")
    estimate.weights.copy_(step.estimate.weights)
    step.run()
    positions = [case.roots, *(forward.positions for forward in step.forwards)]
    bases = [torch.zeros(case.requests, 1), *(forward.values for forward in step.forwards)]
    for found, base, at, logits in zip(step.picks, bases, positions, case.logits(), strict=True):
        exact = picked_by_tensors(step, estimate, logits, at)
        exists = (exact.log_probs > NONE) & (base > NONE)[:, :, None]
        assert exists.any()
        assert torch.equal(found.tokens[exists], exact.tokens[exists])
        edges = found.log_probs.float()
        torch.testing.assert_close(edges[exists], exact.log_probs[exists], atol=1e-4, rtol=1e-4)
        assert (edges[~exists] == NONE).all()
        if exact.features is not None:
            torch.testing.assert_close(found.features, exact.features, atol=2e-2, rtol=1e-4)


def test_equal_values_go_to_the_lowest_tokens_and_keep_parents_first() -> None:
    case = replace(CASE, temperatures=(0.0, 0.0), vocab=5000)
    equal = [torch.zeros_like(each) for each in case.logits()]
    # If the first token is certain, a child has its parent's value.
    sure = [torch.where(torch.arange(5000) == 0, 0.0, -200.0).expand(each.shape) for each in equal]
    for logits in (equal, sure):
        for calibrated in (True, False):
            each = replace(case, calibrated=calibrated)
            ours = on_device(each).run(logits)
            same(ours, on_cpu(each).run(logits))
            assert ours.picks[0].tokens[:, 0].tolist() == [[0, 1, 2, 3]] * case.requests


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_a_distribution_has_no_children(broken: float) -> None:
    """The row is of one request. The other requests' trees do not change."""
    damaged = CASE.logits()
    damaged[0][0, slice(None) if broken == NONE else 7] = broken
    damaged[1][3, 7] = float("nan")
    sound, step = grown(CASE), on_device(CASE).run(damaged)
    tree = step.tree()
    tree.check()
    assert tree.counts.tolist() == [0, 12]
    assert not torch.equal(step.tokens[1], sound.tokens[1])
    assert torch.equal(step.picks[0].tokens[1], sound.picks[0].tokens[1])


def test_memory_is_left_ready_for_the_next_step() -> None:
    ours = on_device(CASE).run(replace(CASE, seed=5).logits())
    same(ours.run(), grown(CASE))


def test_padding_requests_leave_the_others_alone() -> None:
    """Several padding requests share the spare slot."""
    alone, padded = grown(CASE), on_device(replace(CASE, room=(80, 30, 0), temperatures=(0, 0, 0)))
    padded.slots = torch.tensor([1, SLOTS, SLOTS], device=DEVICE)
    padded.run([torch.cat([x, x[: len(x) // 2]]) for x in CASE.logits()])
    for name in STORED:
        assert torch.equal(alone.stored(name)[1], padded.stored(name)[1]), name
    assert torch.equal(alone.tokens[0], padded.tokens[0])
    assert not torch.equal(alone.stored("values")[2], padded.stored("values")[2])


def test_a_frontier_of_nodes_that_are_not_in_the_tree_would_be_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control of the rule that decides which nodes are expanded."""
    stock: Callable[..., None] = DeviceGrowth.expand

    def expand(self: DeviceGrowth, bits: torch.Tensor) -> None:
        self._budget *= 2
        stock(self, bits)
        self._budget //= 2

    monkeypatch.setattr(DeviceGrowth, "expand", expand)
    with pytest.raises(AssertionError):
        same_forwards(on_device(TIGHT).run().forwards, grown(TIGHT).forwards)
