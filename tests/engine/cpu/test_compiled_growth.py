"""Growth in compiled calls grows the trees of the tensors' growth, from the same picks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dyntree_kernels.cpu import growth
from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_kernels.cpu.gumbel import perturbed_logits
from dyntree_kernels.growth import RowBuffers
from dyntree_plugin.drafters.children import ChildPicker, Children, DraftRows
from dyntree_plugin.engine.compiled_growth import CompiledTreeSpeculator, compiled_growth
from dyntree_plugin.engine.draft_forwards import PAD_SLOT
from dyntree_plugin.engine.speculator import TreeSpeculator
from dyntree_plugin.engine.trees import TreeStore
from dyntree_plugin.tree.growth import Frontier, Growth, GrowthConfig
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import TokenTree
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class

VOCAB, GROUPS, MAX_MODEL_LEN = 70, 2, 64
STORED = ("parents", "depths", "values", "counts", "admitted", "grown", "ancestors", "features")


@dataclass(frozen=True)
class Case:
    """A step of requests: ``room`` scratch columns, temperature and whether chained, of each."""

    shape: TreeShape
    seed: int = 0
    room: tuple[int, ...] = (40, 40)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    chained: tuple[bool, ...] = (False, False)
    least: float | None = None
    calibrated: bool = True

    @property
    def plan(self) -> TreePlan:
        growth = GrowthConfig(min_value=self.least)
        return TreePlan(self.shape, growth, "match", calibration=self.calibrated)

    @property
    def roots(self) -> torch.Tensor:
        return MAX_MODEL_LEN - 1 - torch.tensor(self.room)


class Step:
    """The compiled growth of one step, with the memory that it writes."""

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
        # One slot more than requests, as an engine's batch is seldom full.
        room = (self.requests + 1, MAX_MODEL_LEN, self.rows)
        growth = compiled_growth(CompiledGrowth, self.trees, self.estimate, *room)
        assert growth is not None
        return growth

    def logits(self, width: int) -> torch.Tensor:
        """Rows within wider ones, as of a padded vocabulary; some tokens cannot be."""
        made = torch.randn(self.requests * width, self.vocab + 3, generator=self.generator)
        # Of no two equal ones, also in 16 bits.
        made = made.argsort(dim=1) / 8 if self.dtype.itemsize == 2 else 3 * made
        made[:, 5] = float("-inf")
        return made.to(self.dtype)[:, : self.vocab]

    def pick(self, logits: torch.Tensor) -> Children:
        """What was picked below the last expansions, [R, W, K]."""
        self.growth.pick(logits)
        width = len(logits) // self.requests
        new = (slice(self.requests), slice(self.expanded, self.expanded + width))
        self.expanded += width
        picked = (self.growth.tokens, self.growth.edges, self.growth.features)
        tokens, edges, features = (torch.from_numpy(each[new].copy()) for each in picked)
        return Children(tokens, edges, None, features if self.plan.calibrated else None)

    def frontiers(self) -> Iterator[tuple[int, int]]:
        """Expand forward by forward: the width of each, and how many nodes it has."""
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
    """The rows of the draft forward are those of the ``frontier``, in columns from ``first``."""
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
    """Grow one step, and with the same picks in ``tensors``; raises where they differ."""
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


shapes = st.builds(
    TreeShape,
    node_budget=st.integers(1, 40),
    max_depth=st.integers(1, 8),
    width=st.integers(1, 6),
    children=st.integers(1, 5),
    coupling=st.booleans(),
)
of_two = {
    "room": st.tuples(st.integers(0, 45), st.integers(0, 45)),
    "temperatures": st.tuples(*[st.sampled_from([0.0, 0.3, 1.0])] * 2),
    "chained": st.tuples(st.booleans(), st.booleans()),
}
cases = st.builds(
    Case,
    shape=shapes,
    seed=st.integers(0, 10_000),
    least=st.sampled_from([None, 0.001, 0.1]),
    calibrated=st.booleans(),
    **of_two,
)
CASE = Case(TreeShape(node_budget=12, max_depth=4, width=3, children=4))


@settings(max_examples=150, deadline=None)
@given(cases)
def test_the_same_picks_grow_the_same_trees(case: Case) -> None:
    grow_both(Step(case), tensor_growth(case))


def test_memory_is_left_ready_for_the_next_step() -> None:
    first, second = Step(CASE), Step(replace(CASE, seed=1))
    grow_both(first, tensor_growth(CASE))
    second.growth, second.rows, second.trees = first.growth, first.rows, first.trees
    second.estimate = first.estimate
    second.growth.start(
        CASE.roots,
        second.temperatures,
        temperature_class(second.temperatures),
        second.seeds,
        second.chained,
    )
    grow_both(second, tensor_growth(CASE))


@pytest.mark.parametrize(
    "other",
    [
        replace(CASE, shape=replace(CASE.shape, node_budget=11)),
        replace(CASE, room=(40, 2)),
        replace(CASE, least=0.2),
    ],
)
def test_another_growth_would_be_told_apart(other: Case) -> None:
    """The control of the tests above."""
    with pytest.raises((AssertionError, RuntimeError)):
        grow_both(Step(CASE), tensor_growth(other))


def test_a_step_that_stops_early_keeps_what_was_picked() -> None:
    """Where a forward over the last frontier does not pay, there are no picks for it."""
    step, tensors = Step(CASE), tensor_growth(CASE)
    tensors.add(*step.pick(step.logits(1))[:3])
    next(step.frontiers())
    tensors.frontier()
    assert torch.equal(step.finish(), tensors.finish().tokens)


@pytest.mark.parametrize("forwards", [0, 1, 2, 3])
def test_growth_may_end_behind_any_forward_and_be_captured_apart(forwards: int) -> None:
    """Calls that are captured one by one leave growth behind any of them."""
    whole, step, tensors = Step(CASE), Step(replace(CASE, seed=1)), tensor_growth(CASE)
    grow_both(whole, tensor_growth(CASE))
    tensors.add(*step.pick(step.logits(1))[:3])
    for at, width in enumerate(step.widths[:forwards]):
        step.growth.resume(1, len(step.widths))
        step.growth.resume(step.requests, at)
        step.bits = torch.zeros(step.requests * width, step.growth._bits.shape[2]).int()
        step.growth.expand(step.bits)
        tensors.frontier()
        tensors.add(*step.pick(step.logits(width))[:3])
    step.growth.resume(1, len(step.widths))
    step.growth.resume(step.requests, forwards)
    assert torch.equal(step.finish(), tensors.finish().tokens)


def picked_by_tensors(
    step: Step, logits: torch.Tensor, positions: torch.Tensor, seeds: torch.Tensor
) -> Children:
    pick = ChildPicker(step.plan, perturbed_logits, step.estimate)
    per_request = len(logits) // step.requests
    classes = temperature_class(step.temperatures)
    of_rows = (step.temperatures, classes, seeds, step.chained)
    rows = DraftRows(
        *(each.repeat_interleave(per_request) for each in of_rows), positions, positions
    )
    return pick(logits, rows, all_greedy=False).by_request(step.requests)


def picks_differ(step: Step, seeds: torch.Tensor) -> None:
    """Raise unless the root's children and those of the next forward are the picker's."""
    positions = step.case.roots
    for width in (1, step.widths[0]):
        if width > 1:
            assert next(step.frontiers()) == (width, step.requests * width)
            positions = step.rows.positions[: step.requests * width]
        logits = step.logits(width)
        found, expected = step.pick(logits), picked_by_tensors(step, logits, positions, seeds)
        exists = expected.log_probs > float("-inf")
        assert torch.equal(found.tokens[exists], expected.tokens[exists])
        torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-5, rtol=1e-5)
        if found.features is not None:
            torch.testing.assert_close(found.features, expected.features, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("coupling", [True, False])
@pytest.mark.parametrize(
    ("dtype", "vocab"), [(torch.float32, 2500), (torch.bfloat16, 70), (torch.float16, 1030)]
)
def test_the_picks_are_the_pickers(
    dtype: torch.dtype, vocab: int, coupling: bool, calibrated: bool
) -> None:
    shape = replace(CASE.shape, node_budget=40, coupling=coupling)
    case = replace(CASE, shape=shape, calibrated=calibrated)
    step = Step(case, dtype, vocab)
    picks_differ(step, step.seeds)
    if coupling:
        # The control: the noise is that of the request's own seed.
        with pytest.raises(AssertionError):
            picks_differ(Step(case, dtype, vocab), step.seeds + 1)


def test_the_learned_chance_is_the_estimates_of_the_moment() -> None:
    step = Step(CASE)
    step.estimate.weights[:, 0] -= 1
    picks_differ(step, step.seeds)
    control = Step(CASE)
    control.estimate = AcceptanceEstimate("cpu")
    with pytest.raises(AssertionError):
        picks_differ(control, control.seeds)


def test_a_chained_request_has_one_child_per_node() -> None:
    step = Step(replace(CASE, chained=(True, False)))
    edges = step.pick(step.logits(1)).log_probs
    assert edges.isfinite().sum(dim=2).tolist() == [[1], [4]]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_a_distribution_has_no_children(broken: float) -> None:
    """It is one request's: the other's tree is none the worse."""
    trees = []
    for first_row in (broken, 0.0):
        step = Step(CASE)
        logits = step.logits(1)
        logits[0, slice(None) if broken < 0 else 7] += first_row
        step.pick(logits)
        for width, _ in step.frontiers():
            step.pick(step.logits(width))
        trees.append(step.tree(step.finish()))
        trees[-1].check()
    assert [tree.counts.tolist() for tree in trees] == [[0, 12], [12, 12]]
    assert torch.equal(trees[0].tokens[1], trees[1].tokens[1])


def test_equal_scores_go_to_the_lowest_tokens_and_make_a_tree() -> None:
    step = Step(replace(CASE, temperatures=(0.0, 0.0)))
    picked = step.pick(torch.zeros(2, VOCAB))
    assert picked.tokens.tolist() == [[[0, 1, 2, 3]]] * 2
    for width, _ in step.frontiers():
        step.pick(torch.zeros(2 * width, VOCAB))
    step.tree(step.finish()).check()


def test_logits_of_another_number_of_rows_are_refused() -> None:
    step = Step(CASE)
    with pytest.raises(ValueError, match="logits of 3 rows"):
        step.growth.pick(torch.zeros(3, VOCAB))


def test_steps_need_no_kernel_that_the_warm_up_has_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: set[tuple[object, ...]] = set()

    def watch(name: str) -> None:
        kernel = getattr(growth, name)

        def watched(*args: object) -> object:
            called.add((name, *(numba.typeof(each) for each in args)))
            return kernel(*args)

        monkeypatch.setattr(growth, name, watched)

    for name in ("pick_children", "_expand", "_store"):
        watch(name)
    growth.warm_up(torch.bfloat16)
    warm, single = called.copy(), replace(CASE, room=(40,), temperatures=(0.0,), chained=(False,))
    for case in (CASE, single, replace(CASE, calibrated=False)):
        grow_both(Step(case, torch.bfloat16), tensor_growth(case))
    assert called == warm
    # The control: logits of another type are another kernel's.
    grow_both(Step(CASE), tensor_growth(CASE))
    assert called > warm


def test_other_growths_are_not_compiled() -> None:
    plan = TreePlan(CASE.shape, GrowthConfig("chain"), "match", calibration=True)
    trees = TreeStore(2, plan, VOCAB, torch.device("cpu"))
    step = Step(CASE)
    sizes = (2, MAX_MODEL_LEN)
    assert compiled_growth(CompiledGrowth, trees, step.estimate, *sizes, step.rows) is None


@pytest.mark.parametrize(("most", "compiled"), [(40, True), (39, False)])
def test_more_candidates_than_are_compiled_for_are_the_tensors(
    most: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(CASE)  # 10 expansions of 4 children

    class Speculator(CompiledTreeSpeculator):
        growth_type = CompiledGrowth
        most_candidates = most

    monkeypatch.setattr(TreeSpeculator, "set_attn", lambda *_: None)
    speculator = object.__new__(Speculator)
    speculator.trees, speculator.growing = step.trees, step.plan.growing
    speculator._pick = ChildPicker(step.plan, perturbed_logits, step.estimate)
    speculator.max_num_reqs, speculator.max_model_len = 2, MAX_MODEL_LEN
    speculator._input_ids, speculator._positions = step.rows.ids, step.rows.positions
    speculator._slots, speculator._scratch_slots = step.rows.slots, step.rows.scratch
    speculator.set_attn()
    assert (speculator._compiled is not None) == compiled
