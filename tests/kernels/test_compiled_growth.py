"""Check compiled growth on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from graft_checks import GraftChecks
from growth_checks import CASE, GrowthChecks
from growth_steps import Case, Step, runs_parents, same, same_trees
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_plugin.tree.shape import TreeShape


class TestCompiledGrowth(GrowthChecks):
    kind = CompiledGrowth


class TestCompiledGrowthWithTries(GraftChecks):
    kind = CompiledGrowth


def of_two(*values: Any) -> st.SearchStrategy[tuple[Any, Any]]:
    return st.tuples(*[st.sampled_from(values)] * 2)


cases = st.builds(
    Case,
    shape=st.builds(
        TreeShape,
        node_budget=st.integers(1, 40),
        max_depth=st.integers(1, 8),
        width=st.integers(1, 6),
        children=st.integers(1, 5),
        coupling=st.booleans(),
        head=st.booleans(),
        grafts=st.sampled_from([0, 0, 3, 12, 40]),
    ),
    seed=st.integers(0, 10_000),
    room=of_two(*range(45)),
    temperatures=of_two(0.0, 0.3, 1.0),
    chained=st.sampled_from([(), (), (0,), (1,), (0, 1)]),
    least=st.sampled_from([None, 0.001, 0.1]),
    calibrated=st.booleans(),
    vocab=st.just(70),
    levels=st.none() | of_two(*range(1, 10)),
)


def well_apart(step: Step) -> bool:
    """Return whether rounding cannot change the order of the oracle's candidates."""
    for request in step.growth.requests:
        values = torch.tensor([node.value for node in request.candidates]).sort().values
        gaps = values.diff()
        if not ((gaps == 0) | (gaps > 1e-5) | gaps.isnan()).all():
            return False
    return True


@settings(max_examples=80, deadline=None)
@given(cases, st.integers(0, 8))
def test_growth_of_any_shape_that_ends_after_any_forward_is_the_oracles(
    case: Case, forwards: int
) -> None:
    expected = Step(case).run(forwards=forwards)
    assume(well_apart(expected))
    ours = Step(case, CompiledGrowth).run(forwards=forwards)
    same(ours, expected)
    assert not (case.shape.head and forwards >= len(ours.widths) and runs_parents(ours))


@settings(max_examples=40, deadline=None)
@given(cases)
def test_a_trie_of_any_shape_makes_the_oracles_tree(case: Case) -> None:
    case = replace(case, shape=replace(case.shape, grafts=max(1, case.shape.grafts)))
    expected = Step(case).alone()
    assume(well_apart(expected))
    same_trees(Step(case, CompiledGrowth).alone(), expected)


def test_a_step_that_stops_before_a_pick_keeps_what_was_picked() -> None:
    """If a forward over the last frontier does not pay, the frontier has no picks."""
    ours, expected = Step(CASE, CompiledGrowth), Step(CASE).run(forwards=0)
    ours.start().pick(CASE.logits()[0])
    ours.expand(ours.widths[0])
    same_trees(ours.finish(), expected)


class OtherNoise(CompiledGrowth):
    """Draws a narrow chain with the noise of whatever expansion has its number."""

    def narrow(self) -> bool:
        seeds = self._seeds
        found = super().narrow()
        self._seeds = seeds
        return found


def narrow_chains(case: Case, kind: Any = CompiledGrowth) -> Step:
    """Grow chains in forwards of one row for each request."""
    ours, (first, *others) = Step(case, kind).start(), case.logits()
    assert ours.growth.narrow()
    ours.pick(first)
    for width, logits in zip(ours.widths, others, strict=True):
        ours.expand(1)
        ours.pick(logits[::width])
    return ours.finish()


def offered(step: Step) -> list[torch.Tensor]:
    """Return what the nodes of the step's trees were drawn from."""
    assert step.draws is not None
    origins, slots = step.draws.origins[step.slots], step.slots[:, None]
    return [each[slots, origins] for each in step.draws.distributions]


DRAWN_CHAINS = Case(
    TreeShape(node_budget=6, max_depth=6, width=3, children=3),
    room=(80, 80),
    temperatures=(1.0, 0.7),
    draws=True,
)
CHAINS = replace(CASE, chained=(0, 1))


def test_narrow_chains_are_those_of_wide_forwards() -> None:
    for case in (CHAINS, DRAWN_CHAINS, replace(DRAWN_CHAINS, seed=1)):
        ours, wide = narrow_chains(case), Step(case, CompiledGrowth).run()
        same_trees(ours, wide)
        assert ours.tree().counts.min() > 2
        if case.draws:
            for own, other in zip(offered(ours), offered(wide), strict=True):
                assert torch.equal(own, other)


def test_narrow_chains_with_the_noise_of_other_expansions_are_others() -> None:
    """Control."""
    wide = Step(DRAWN_CHAINS, CompiledGrowth).run()
    assert not torch.equal(narrow_chains(DRAWN_CHAINS, OtherNoise).tokens, wide.tokens)


def test_forwards_stay_wide_beside_a_tree() -> None:
    for case in (CASE, replace(DRAWN_CHAINS, temperatures=(1.0, 0.0))):
        assert not Step(case, CompiledGrowth).start().growth.narrow()
    step = Step(DRAWN_CHAINS, CompiledGrowth).start()
    assert step.growth.narrow()
    wide = replace(step.case, temperatures=(0.0, 0.0))
    step.case = wide
    assert not step.start().growth.narrow()
    step.run()
    same_trees(step, Step(wide, CompiledGrowth).run())
