"""Growth on the device in many cases, on a GPU or in Triton's interpreter.

Its trees are those of growth on the CPU. From the same picks, they are those of growth on tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from paged_cases import DEVICE

pytest.importorskip("numba", reason="it compares with the CPU's kernels, which need numba")

from growth_steps import (
    CASE,
    SLOTS,
    STORED,
    Case,
    Step,
    grown,
    on_cpu,
    on_device,
    same,
    same_as_tensors,
    same_forwards,
)

from dyntree_kernels.cpu.gumbel import perturbed_logits
from dyntree_kernels.cuda.growth import DeviceGrowth
from dyntree_plugin.tree.children import ChildPicker, Children, DraftRows
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import NO_VALUE as NONE
from dyntree_plugin.tree.value import AcceptanceEstimate

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of -inf and NaN

LARGE = replace(CASE, shape=TreeShape(node_budget=34, max_depth=5, width=9, children=3))
TIGHT = replace(CASE, shape=TreeShape(node_budget=6, max_depth=4, width=5, children=4))
CASES = {
    "small": CASE,
    "several words of bits": LARGE,
    "most nodes are not in the tree": TIGHT,
    "another": replace(CASE, seed=1, temperatures=(1.0, 0.3)),
    "no room": replace(CASE, room=(2, 0)),
    "chained": replace(CASE, chained=(1,)),
    "little left": replace(CASE, levels=(1, 3)),
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
    "a head": replace(CASE, shape=replace(CASE.shape, head=True)),
    "a head in little room, with several words of bits": replace(
        LARGE, shape=replace(LARGE.shape, head=True), room=(9, 1), chained=(1,)
    ),
}


OF_16_BITS = {
    "bfloat16": replace(CASE, dtype=torch.bfloat16, vocab=200),
    "float16": replace(CASE, dtype=torch.float16),
}


@pytest.mark.parametrize("name", CASES)
def test_the_trees_are_those_of_the_cpus_growth(name: str) -> None:
    same(grown(CASES[name]), on_cpu(CASES[name]).run())


@pytest.mark.parametrize(
    "other",
    [
        replace(CASE, shape=replace(CASE.shape, node_budget=11)),
        replace(CASE, room=(80, 2)),
        replace(CASE, least=0.2),
        replace(CASE, levels=(9, 2)),
        replace(CASE, chained=(0,)),
        replace(CASE, temperatures=(0.0, 0.6)),
        replace(CASE, seed=1),
        replace(CASE, shape=replace(CASE.shape, head=True)),
    ],
)
def test_another_growth_would_be_told_apart(other: Case) -> None:
    """Control of the test above."""
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        same(grown(CASE), on_cpu(other).run())


@pytest.mark.parametrize("name", CASES)
def test_the_same_picks_grow_the_trees_of_the_tensors_growth(name: str) -> None:
    same_as_tensors(grown(CASES[name]))


def picked_by_tensors(
    step: Step, estimate: AcceptanceEstimate, logits: torch.Tensor, positions: torch.Tensor
) -> Children:
    pick = ChildPicker(step.plan, perturbed_logits, estimate)
    width = len(logits) // step.case.requests
    of_rows = (each.repeat_interleave(width) for each in step.of_requests)
    rows = DraftRows(*of_rows, positions, positions)
    return pick(logits, rows, all_greedy=False).by_request(step.case.requests)


@pytest.mark.parametrize(
    "name", ["small", "chained", "uncalibrated", "uncoupled", "many blocks", "a head", *OF_16_BITS]
)
def test_the_picks_are_the_pickers(name: str) -> None:
    case = (CASES | OF_16_BITS)[name]
    case = replace(case, shape=replace(case.shape, node_budget=60))
    step = on_device(case)
    step.estimate.weights[:, 0] -= 1  # the kernels use learned weights
    estimate = AcceptanceEstimate("cpu")
    estimate.weights.copy_(step.estimate.weights)
    step.run()
    rows_at = [forward.positions for forward in step.forwards]
    positions = [case.roots, *(at - case.shape.shift for at in rows_at)]
    bases = [torch.zeros(case.requests, 1), *(forward.values for forward in step.forwards)]
    picks = (pick.children for pick in step.picks)
    for found, base, at, logits in zip(picks, bases, positions, case.logits(), strict=True):
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
            assert ours.picks[0].children.tokens[:, 0].tolist() == [[0, 1, 2, 3]] * case.requests


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
    assert torch.equal(step.picks[0].children.tokens[1], sound.picks[0].children.tokens[1])


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
