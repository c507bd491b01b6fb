"""Growth in compiled calls grows the same trees as growth on tensors, from the same picks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numba
import pytest
import torch
from compiled_steps import (
    CASE,
    MAX_MODEL_LEN,
    VOCAB,
    Case,
    Step,
    add_picks,
    graft,
    grow_both,
    same_trees,
    tensor_growth,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dyntree_kernels.contracts import BESIDE, BOTH, DRAFT, LOOK_UP
from dyntree_kernels.cpu import growth
from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_plugin.engine.papers.tensor_growth import TensorGrowth
from dyntree_plugin.engine.step.ops import at_hand
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.value import AcceptanceEstimate
from vllm_cpu_runner import install

install()  # must run before the runner's modules are imported

from dyntree_kernels.contracts import StepGrowth  # noqa: E402
from dyntree_plugin.engine.compose import Composer  # noqa: E402
from dyntree_plugin.engine.cpu.ops import CPUOps  # noqa: E402
from dyntree_plugin.engine.step.rows import GrowthMemory  # noqa: E402

GRAFTED = replace(CASE, shape=replace(CASE.shape, node_budget=24), grafts=16)
HEAD = replace(GRAFTED, shape=replace(GRAFTED.shape, head=True))

shapes = st.builds(
    TreeShape,
    node_budget=st.integers(1, 40),
    max_depth=st.integers(1, 8),
    width=st.integers(1, 6),
    children=st.integers(1, 5),
    coupling=st.booleans(),
    head=st.booleans(),
)
of_two = {
    "room": st.tuples(st.integers(0, 45), st.integers(0, 45)),
    "temperatures": st.tuples(*[st.sampled_from([0.0, 0.3, 1.0])] * 2),
    "chained": st.tuples(st.booleans(), st.booleans()),
    "levels": st.none() | st.tuples(st.integers(1, 9), st.integers(1, 9)),
}
cases = st.builds(
    Case,
    shape=shapes,
    seed=st.integers(0, 10_000),
    least=st.sampled_from([None, 0.001, 0.1]),
    calibrated=st.booleans(),
    grafts=st.sampled_from([0, 0, 3, 12, 40]),
    **of_two,
)


@settings(max_examples=150, deadline=None)
@given(cases)
def test_the_same_picks_grow_the_same_trees(case: Case) -> None:
    step = Step(case)
    grow_both(step, tensor_growth(case))
    assert not (case.shape.head and step.ran_parents)


def test_a_draft_model_runs_a_node_and_its_child_in_one_forward_and_a_head_does_not() -> None:
    """Control of the test above, and of what both growths do for a head."""
    for head in (False, True):
        case = replace(GRAFTED, shape=replace(GRAFTED.shape, head=head))
        steps = [Step(replace(case, seed=seed)) for seed in range(10)]
        for step in steps:
            grow_both(step, tensor_growth(step.case))
        assert any(step.ran_parents for step in steps) != head


@pytest.mark.parametrize("case", [CASE, GRAFTED, HEAD])
def test_no_node_is_deeper_than_a_request_has_a_use_for(case: Case) -> None:
    """Control: without a limit nodes are deeper. The trees have as many nodes, but at depth 1."""
    free, limited = Step(case), Step(replace(case, levels=(1, 2)))
    for step in (free, limited):
        grow_both(step, tensor_growth(step.case))
    deepest = [step.trees.depths[:2].amax(dim=1).tolist() for step in (free, limited)]
    assert min(deepest[0]) > 2
    assert deepest[1] == [1, 2]
    assert limited.trees.counts[1] == free.trees.counts[1]


@pytest.mark.parametrize("case", [CASE, GRAFTED, HEAD])
def test_memory_is_left_ready_for_the_next_step(case: Case) -> None:
    first, second = Step(case), Step(replace(case, seed=1))
    grow_both(first, tensor_growth(case))
    second.growth, second.rows, second.trees = first.growth, first.rows, first.trees
    second.estimate = first.estimate
    second.start()
    grow_both(second, tensor_growth(case))


@pytest.mark.parametrize(
    "other",
    [
        replace(CASE, shape=replace(CASE.shape, node_budget=11)),
        replace(CASE, room=(40, 2)),
        replace(CASE, least=0.2),
        replace(CASE, levels=(9, 2)),
    ],
)
@pytest.mark.parametrize("grafts", [0, GRAFTED.grafts])
def test_another_growth_would_be_told_apart(other: Case, grafts: int) -> None:
    """Control of the tests above."""
    with pytest.raises((AssertionError, RuntimeError)):
        grow_both(Step(replace(CASE, grafts=grafts)), tensor_growth(other))


@pytest.mark.parametrize("case", [CASE, GRAFTED])
def test_a_step_that_stops_early_keeps_what_was_picked(case: Case) -> None:
    """If a forward over the last frontier does not pay, the frontier has no picks."""
    step, tensors = Step(case), tensor_growth(case)
    graft(step, tensors)
    picked = step.pick(step.logits(1))
    add_picks(step, tensors, picked)
    next(step.frontiers())
    tensors.frontier()
    same_trees(step, tensors, [picked])


@settings(max_examples=40, deadline=None)
@given(cases)
def test_a_trie_makes_a_tree_without_any_pick(case: Case) -> None:
    case = replace(case, grafts=max(1, case.grafts))
    step, tensors = Step(case), tensor_growth(case)
    graft(step, tensors)
    same_trees(step, tensors, [])


def test_the_trie_stands_in_the_trees_and_the_draft_judges_it() -> None:
    kinds = set()
    for seed in range(10):
        case = replace(GRAFTED, seed=seed)
        step = Step(case)
        grow_both(step, tensor_growth(case))
        for row in range(step.requests):
            kinds |= set(step.trees.kinds[row, : step.trees.counts[row]].tolist())
    assert kinds == {DRAFT, LOOK_UP, BOTH, BESIDE}


@pytest.mark.parametrize("forwards", [0, 1, 2, 3])
def test_growth_may_end_behind_any_forward_and_be_captured_apart(forwards: int) -> None:
    """Growth may end after any forward, because its calls are captured one by one."""
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
    # Control: logits of another type need another kernel.
    grow_both(Step(CASE), tensor_growth(CASE))
    assert called > warm


LAST = MAX_MODEL_LEN - 1


def growth_of(step: Step, plan: TreePlan, ops: Any) -> StepGrowth:
    """Return the growth that an engine of a plan has."""
    nothing: Any = None
    trees, estimate = TreeStore(2, plan, VOCAB, torch.device("cpu")), AcceptanceEstimate("cpu")
    composer = Composer(trees, nothing, estimate, ops, nothing, nothing, nothing)
    return composer.growth(GrowthMemory(step.of_requests, step.rows, LAST))


def test_other_growths_are_not_compiled() -> None:
    step = Step(CASE)
    for name, kind in (("topk", CompiledGrowth), ("chain", TensorGrowth)):
        plan = TreePlan(CASE.shape, GrowthConfig(name), "match", calibration=True)
        assert isinstance(growth_of(step, plan, CPUOps()), kind)


@pytest.mark.parametrize(("most", "compiled"), [(40, True), (39, False)])
def test_more_candidates_than_are_compiled_for_are_the_tensors(
    most: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the limit is that of the CUDA kernels, which need Triton")
    from dyntree_plugin.engine.cuda import ops as cuda_ops

    monkeypatch.setattr(cuda_ops, "MOST_CANDIDATES", most)
    step = Step(CASE)  # 10 expansions of 4 children
    growth = growth_of(step, step.plan, cuda_ops.CUDAOps(at_hand))
    assert isinstance(growth, TensorGrowth) != compiled
