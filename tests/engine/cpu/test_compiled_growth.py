"""Growth in compiled calls grows the trees of the tensors' growth, from the same picks."""

from __future__ import annotations

from dataclasses import replace

import numba
import pytest
import torch
from compiled_steps import CASE, MAX_MODEL_LEN, VOCAB, Case, Step, grow_both, tensor_growth
from hypothesis import given, settings
from hypothesis import strategies as st

from dyntree_kernels.cpu import growth
from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_kernels.cpu.gumbel import perturbed_logits
from dyntree_plugin.engine.step.compiled_growth import CompiledTreeSpeculator, compiled_growth
from dyntree_plugin.engine.step.draft import TreeSpeculator
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import ChildPicker
from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.value import temperature_class

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
    speculator._root_positions = torch.zeros(2, dtype=torch.int64)
    speculator._slots, speculator._scratch_slots = step.rows.slots, step.rows.scratch
    speculator.set_attn()
    assert (speculator._compiled is not None) == compiled
