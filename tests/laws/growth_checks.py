"""Check on every device that growth makes the trees of the oracle, from the same logits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from growth_steps import CPU, SLOTS, STORED, Case, Kind, Step, same
from reference.best_first import BestFirst

from dyntree_plugin.tree.shape import TreeShape

CASE = Case(TreeShape(node_budget=12, max_depth=4, width=3, children=4))
HEAD = replace(CASE, shape=replace(CASE.shape, head=True))
LARGE = replace(CASE, shape=TreeShape(node_budget=34, max_depth=5, width=9, children=3))
TIGHT = replace(CASE, shape=TreeShape(node_budget=6, max_depth=4, width=5, children=4))
ALL = replace(CASE, shape=replace(CASE.shape, node_budget=60))
"""Every candidate is in the tree, so that the comparison covers all picks."""
CASES = {
    "usual": CASE,
    "several words of bits": LARGE,
    "most nodes are not in the tree": TIGHT,
    "three requests": replace(CASE, room=(80, 80, 80), temperatures=(0.0, 0.7, 1.3)),
    "another": replace(CASE, seed=1, temperatures=(1.0, 0.3)),
    "no room": replace(CASE, room=(2, 0)),
    "chained": replace(CASE, chained=(1,)),
    "little left": replace(CASE, levels=(1, 3)),
    "a least value": replace(CASE, least=0.05),
    "uncalibrated": replace(CASE, calibrated=False),
    "uncalibrated and chained, with a least value": replace(
        LARGE, calibrated=False, chained=(0,), least=1e-4, room=(80, 20)
    ),
    "one child": replace(CASE, shape=TreeShape(5, max_depth=5, width=1, children=1)),
    "only the root is expanded": replace(CASE, shape=TreeShape(3, 1, width=2, children=4)),
    "more room than candidates": replace(CASE, shape=TreeShape(40, 2, width=2, children=3)),
    "uncoupled": replace(CASE, shape=replace(CASE.shape, coupling=False)),
    "many blocks": replace(CASE, vocab=5000),
    "all picks": ALL,
    "all picks, chained": replace(ALL, chained=(1,)),
    "all picks, uncalibrated": replace(ALL, calibrated=False),
    "all picks, uncoupled": replace(ALL, shape=replace(ALL.shape, coupling=False)),
    "all picks in many blocks": replace(ALL, vocab=2500),
    "all picks from bfloat16": replace(ALL, dtype=torch.bfloat16, vocab=200),
    "all picks from float16": replace(ALL, dtype=torch.float16),
    "a head": HEAD,
    "a head, with all picks": replace(ALL, shape=replace(ALL.shape, head=True)),
    "a head in little room, with several words of bits": replace(
        LARGE, shape=replace(LARGE.shape, head=True), room=(9, 1), chained=(1,)
    ),
}
OTHERS = (
    replace(CASE, shape=replace(CASE.shape, node_budget=11)),
    replace(CASE, room=(80, 2)),
    replace(CASE, least=0.2),
    replace(CASE, levels=(9, 2)),
    replace(CASE, chained=(0,)),
    replace(CASE, noise=1),
    replace(CASE, room=(80, 79)),
    replace(CASE, calibrated=False),
)

BROKEN = [float("nan"), float("inf"), float("-inf")]


@cache
def by_oracle(case: Case) -> Step:
    return Step(case).run()


class Growths:
    """Steps of growth by ``kind`` on ``device``."""

    kind: ClassVar[Kind]
    device: ClassVar[torch.device] = CPU

    def step(self, case: Case) -> Step:
        return Step(case, type(self).kind, self.device)

    @cache  # noqa: B019  # the instances of test classes are few, and equal by their class
    def grown(self, case: Case) -> Step:
        return self.step(case).run()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


class GrowthChecks(Growths):
    """Tests of growth without tries."""

    @pytest.mark.parametrize("name", CASES)
    def test_the_trees_are_those_of_the_oracle(self, name: str) -> None:
        same(self.grown(CASES[name]), by_oracle(CASES[name]))

    @pytest.mark.parametrize("other", OTHERS)
    def test_another_growth_is_told_apart(self, other: Case) -> None:
        with pytest.raises((AssertionError, RuntimeError)):
            same(self.grown(CASE), by_oracle(other))

    def test_a_frontier_of_nodes_that_are_not_in_the_tree_is_told_apart(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Control of the rule that decides which nodes are expanded."""
        stock = BestFirst.chosen

        def chosen(growth: BestFirst, *given: Any) -> Any:
            settings = growth.settings
            growth.settings = settings._replace(node_budget=2 * settings.node_budget)
            found = stock(growth, *given)
            growth.settings = settings
            return found

        monkeypatch.setattr(BestFirst, "chosen", chosen)
        with pytest.raises(AssertionError):
            same(self.grown(TIGHT), Step(TIGHT).run())

    def test_the_learned_chance_is_the_estimates_of_the_moment(self) -> None:
        ours, theirs = self.step(CASE), Step(CASE)
        ours.estimate.weights[:, 0] -= 1
        with pytest.raises(AssertionError):
            same(ours.run(), theirs.run())
        theirs.estimate.weights[:, 0] -= 1
        same(ours.run(), theirs.run())

    def test_no_node_is_deeper_than_a_request_has_a_use_for(self) -> None:
        free, limited = self.grown(CASE), self.grown(replace(CASE, levels=(1, 2)))
        deepest = [step.tree().depths.amax(dim=1).tolist() for step in (free, limited)]
        assert min(deepest[0]) > 2
        assert deepest[1] == [1, 2]
        assert limited.tree().counts[1] == free.tree().counts[1]

    @pytest.mark.parametrize("case", [CASE, HEAD], ids=["draft", "head"])
    def test_memory_is_left_ready_for_the_next_step(self, case: Case) -> None:
        same(self.step(case).run(replace(case, seed=5).logits()).run(), by_oracle(case))

    @pytest.mark.parametrize("forwards", range(4))
    def test_growth_may_end_after_any_forward_and_be_captured_apart(self, forwards: int) -> None:
        ours = self.step(CASE).run(replace(CASE, seed=5).logits())
        same(ours.run(forwards=forwards, apart=True), Step(CASE).run(forwards=forwards))
        assert ours.tree().depths.max() == 1 + forwards

    @pytest.mark.parametrize("forwards", [0, 3])
    def test_an_end_after_another_forward_is_told_apart(self, forwards: int) -> None:
        ours = self.step(CASE).run()
        ours.run(forwards=1)
        same(ours, Step(CASE).run(forwards=1))
        ours.run(forwards=1)
        ours.growth.resume(CASE.requests, forwards)
        with pytest.raises((AssertionError, ValueError)):
            same(ours.finish(), Step(CASE).run(forwards=1))

    @pytest.mark.parametrize("vocab", [CASE.vocab, 5000])
    @pytest.mark.parametrize("broken", BROKEN)
    @pytest.mark.parametrize("whole", [True, False])
    def test_a_row_without_a_distribution_has_no_children(
        self, broken: float, whole: bool, vocab: int
    ) -> None:
        """The other requests' trees do not change."""
        case = replace(CASE, vocab=vocab)
        damaged = case.logits()
        damaged[0][0, slice(None) if broken < 0 or whole else 7] = broken
        damaged[1][3, 7] = float("nan")
        ours = self.step(case).run(damaged)
        same(ours, Step(case).run(damaged))
        assert ours.tree().counts.tolist() == [0, 12]
        assert ours.stored("features").isfinite().all()
        assert not torch.equal(ours.tokens[1], self.grown(case).tokens[1])

    @pytest.mark.parametrize("calibrated", [True, False])
    @pytest.mark.parametrize("sure", [True, False])
    def test_equal_values_go_to_the_lowest_tokens_and_keep_parents_first(
        self, sure: bool, calibrated: bool
    ) -> None:
        """If the first token is certain, a child has its parent's value."""
        case = replace(CASE, temperatures=(0.0, 0.0), vocab=5000, calibrated=calibrated)
        others = torch.where(torch.arange(5000) == 0, 0.0, -200.0 if sure else 0.0)
        ours = self.step(case).run([others.expand(each.shape) for each in case.logits()])
        ours.tree().check()
        for row in range(case.requests):
            below_root = ours.tree().parents[row] == -1
            tokens = ours.tokens[row][below_root].tolist()
            assert tokens == list(range(len(tokens)))
            assert 0 in tokens

    def test_padding_requests_leave_the_others_alone(self) -> None:
        """Several padding requests share the spare slot."""
        alone, three = self.grown(CASE), replace(CASE, room=(80, 30, 0), temperatures=(0, 0, 0))
        padded = self.step(three)
        padded.slots = torch.tensor([2, SLOTS, SLOTS], device=self.device)
        padded.run([torch.cat([x, x[: len(x) // 2]]) for x in CASE.logits()])
        for name in STORED:
            assert torch.equal(alone.stored(name)[2], padded.stored(name)[2]), name
        assert torch.equal(alone.tokens[0], padded.tokens[0])
        assert not torch.equal(alone.stored("values")[0], padded.stored("values")[0])

    def test_logits_of_another_number_of_rows_are_refused(self) -> None:
        with pytest.raises(ValueError, match="logits of 4 rows"):
            self.step(CASE).start().pick(torch.zeros(4, CASE.vocab))
