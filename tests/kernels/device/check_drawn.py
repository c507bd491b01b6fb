"""Check the kernels of drawn trees, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_cases import DEVICE

pytest.importorskip("numba", reason="what they are compared with takes the CPU's noise")
pytest.importorskip("vllm", reason="the store of draws belongs to the engine")

from drawn_checks import DrawnChecks
from growth_steps import CPU, Case, Step, same

from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_kernels.cuda import traversal
from dyntree_kernels.cuda.growth import DeviceGrowth
from dyntree_plugin.tree.shape import TreeShape


@pytest.fixture
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traversal, "_BLOCK", 128)


@pytest.mark.usefixtures("several_blocks")
class TestTraversalOnTheDevice(DrawnChecks):
    decide = staticmethod(traversal.decide_trees)
    device = DEVICE


CASE = Case(
    TreeShape(node_budget=32, max_depth=4, width=4, children=6),
    temperatures=(0.0, 0.7, 1.3), room=(80, 80, 80), draws=True,
)  # fmt: skip
CASES = {
    "usual": CASE,
    "chains, in many blocks": replace(CASE, shape=replace(CASE.shape, node_budget=12), vocab=2500),
    "few tokens, uncalibrated, with little left": replace(
        CASE, vocab=8, calibrated=False, levels=(2, 3, 4)
    ),
    "a head, with tries": replace(CASE, shape=replace(CASE.shape, head=True, grafts=6)),
}


def drawn(case: Case, on_the_device: bool) -> Step:
    return Step(case, *((DeviceGrowth, DEVICE) if on_the_device else (CompiledGrowth, CPU))).run()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_trees_are_drawn_as_on_a_cpu(case: Case) -> None:
    ours, other = drawn(case, True), drawn(case, False)
    same(ours, other)
    slots, real = ours.slots.cpu()[1:], (ours.tree().values > -torch.inf)[1:]
    assert ours.draws is not None
    assert other.draws is not None
    mine, wanted = ours.draws.origins.cpu()[slots][real], other.draws.origins[slots][real]
    assert torch.equal(mine, wanted)
    used = slots[:, None].expand_as(real)[real], mine
    assert torch.equal(
        ours.draws.distributions.tokens.cpu()[used], other.draws.distributions.tokens[used]
    )
    torch.testing.assert_close(
        ours.draws.distributions.chances.cpu()[used], other.draws.distributions.chances[used]
    )
    branches = ours.tree().counts - ours.stored("depths")[ours.slots.cpu()].amax(1)
    assert bool((branches[1:] > 0).any()) is ours.plan.drawn_trees


@pytest.mark.parametrize("other", [replace(CASE, noise=1), replace(CASE, temperatures=(0, 0.8, 1))])
def test_the_comparison_notices_other_noise_and_temperatures(other: Case) -> None:
    with pytest.raises(AssertionError):
        same(drawn(other, False), drawn(CASE, False))
