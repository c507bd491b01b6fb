"""Check on every device that growth takes tries as the oracle does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from growth_checks import BROKEN, CASE, Growths, by_oracle
from growth_steps import CPU, Case, Step, runs_parents, same, same_trees
from reference.best_first import BestFirst, Node

from dyntree_kernels.contracts import BESIDE, BOTH, DRAFT, LOOK_UP
from dyntree_kernels.tries import Trie
from dyntree_plugin.tree.shape import TreeShape

GRAFTED = replace(CASE, shape=TreeShape(24, 5, width=4, children=2, grafts=16))
GRAFTED_HEAD = replace(GRAFTED, shape=replace(GRAFTED.shape, head=True))


def grafted(case: Case = GRAFTED, **shape: Any) -> Case:
    return replace(case, shape=replace(case.shape, **shape))


WIDE = replace(CASE, shape=TreeShape(40, 6, width=9, children=3, grafts=40))
WITH_TRIES = {
    "usual": GRAFTED,
    **{f"usual {seed}": replace(GRAFTED, seed=seed, temperatures=(0.3, 1.0)) for seed in (1, 3)},
    "several words of bits": WIDE,
    "several words of bits, and a small budget": replace(grafted(WIDE, node_budget=12), seed=4),
    "deeper than the forwards": grafted(max_depth=9, max_forwards=3),
    "shallow": grafted(max_depth=2),
    "only the root is expanded": grafted(max_forwards=1),
    "one node": grafted(grafts=1),
    "the largest tries": grafted(grafts=64, node_budget=80),
    "one child": replace(GRAFTED, shape=TreeShape(16, 5, width=1, children=1, grafts=12)),
    "little room": replace(GRAFTED, room=(4, 0)),
    "chained": replace(GRAFTED, chained=(1,)),
    "little left": replace(GRAFTED, levels=(1, 3)),
    "a least value": replace(GRAFTED, least=0.05),
    "only the root's best child is worth enough": replace(GRAFTED, least=0.999),
    "uncalibrated": replace(GRAFTED, calibrated=False),
    "uncoupled": replace(grafted(coupling=False), temperatures=(0.5, 1.0)),
    "many blocks": replace(GRAFTED, vocab=5000),
    "16 bits": replace(GRAFTED, dtype=torch.float16),
}
HEADS = (
    *("usual", "usual 1", "several words of bits, and a small budget", "chained"),
    *("deeper than the forwards", "little room", "little left", "uncalibrated"),
)
WITH_TRIES |= {f"a head: {name}": grafted(WITH_TRIES[name], head=True) for name in HEADS}


def without_merge(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BestFirst, "is_known", lambda self, token, beside: False)


def without_judgement(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BestFirst, "judge", lambda *given: None)


def other_kinds(patch: pytest.MonkeyPatch) -> None:
    stock = Node.__init__

    def init(self: Node, token: int, above: Any, chance: float, kind: int, known: Any) -> None:
        stock(self, token, above, chance, DRAFT if kind == BESIDE else kind, known)

    patch.setattr(Node, "__init__", init)


def other_evidence(patch: pytest.MonkeyPatch) -> None:
    stock = Case.trie
    patch.setattr(Case, "trie", lambda case: stock(case)._replace(evidence=stock(case)[2] + 1))


def whole_paths(patch: pytest.MonkeyPatch) -> None:
    """Let a head's forward run a node and its child, as a draft model's does."""
    patch.setattr(BestFirst, "runs_paths", lambda self, node, taken: node.above in taken)


class GraftChecks(Growths):
    """Tests of growth with tries."""

    @pytest.mark.parametrize("name", WITH_TRIES)
    def test_the_trees_are_those_of_the_oracle(self, name: str) -> None:
        same(self.grown(WITH_TRIES[name]), by_oracle(WITH_TRIES[name]))

    @pytest.mark.parametrize(
        "broken",
        [without_merge, without_judgement, other_kinds, other_evidence, whole_paths],
    )
    def test_a_merge_or_a_judgement_that_is_broken_is_seen(
        self, broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Control of the comparison with the oracle, which is broken."""
        ours = self.grown(GRAFTED_HEAD)
        broken(monkeypatch)
        with pytest.raises((AssertionError, ValueError)):
            same(ours, Step(GRAFTED_HEAD).run())

    @pytest.mark.parametrize(
        "name",
        ["usual", "several words of bits", "shallow", "chained", "a least value", "uncalibrated"],
    )
    def test_a_trie_makes_a_tree_without_any_pick(self, name: str) -> None:
        ours = self.step(WITH_TRIES[name]).alone()
        same_trees(ours, Step(WITH_TRIES[name]).alone())
        assert ours.kinds() == {LOOK_UP}

    def test_the_trees_have_nodes_of_every_kind(self) -> None:
        kinds = [self.grown(case).kinds() for case in WITH_TRIES.values()]
        assert set().union(*kinds) == {DRAFT, LOOK_UP, BOTH, BESIDE}

    def test_no_forward_of_a_head_runs_a_node_and_its_child(self) -> None:
        """Control: a draft model's do."""
        heads = [case for case in WITH_TRIES.values() if case.shape.head]
        assert not any(runs_parents(self.grown(case)) for case in heads)
        assert runs_parents(self.grown(GRAFTED))

    def test_no_node_has_two_children_of_one_token(self) -> None:
        for case in WITH_TRIES.values():
            tree = self.grown(case).tree()
            for parents, tokens, count in zip(tree.parents, tree.tokens, tree.counts, strict=True):
                edges = [*zip(parents[:count].tolist(), tokens[:count].tolist(), strict=True)]
                assert len({*edges}) == len(edges)

    @pytest.mark.parametrize("case", [GRAFTED, GRAFTED_HEAD], ids=["draft", "head"])
    def test_no_node_is_deeper_than_a_request_has_a_use_for(self, case: Case) -> None:
        free, limited = self.grown(case), self.grown(replace(case, levels=(1, 2)))
        deepest = [step.tree().depths.amax(dim=1).tolist() for step in (free, limited)]
        assert min(deepest[0]) > 2
        assert deepest[1] == [1, 2]

    def test_what_both_propose_is_one_node_which_the_draft_judges(self) -> None:
        trie = Trie.room(2, GRAFTED.shape.grafts, CPU)
        trie.tokens[:, :2], trie.exists[:, :2] = torch.tensor([7, 8]), True
        step = self.step(replace(GRAFTED, temperatures=(0.0, 0.0))).start().graft(trie)
        logits = torch.zeros(2, step.case.vocab)
        logits[:, [7, 9]] = torch.tensor([9.0, 8.0])
        step.pick(logits)
        step.finish()
        assert step.tree().counts.tolist() == [3, 3]
        kinds = step.stored("kinds")[step.slots.cpu(), :3].tolist()
        for of_request, tokens in zip(kinds, step.tokens[:, :3].tolist(), strict=True):
            assert dict(zip(tokens, of_request, strict=True)) == {7: BOTH, 8: BOTH, 9: BESIDE}

    @pytest.mark.parametrize("picked", [True, False])
    def test_the_noise_is_that_of_the_requests_seed_at_the_nodes_depth(self, picked: bool) -> None:
        warm = replace(GRAFTED, temperatures=(0.7, 1.0))

        def compare(ours: Case, theirs: Case) -> None:
            if picked:
                same(self.grown(ours), by_oracle(theirs))
            else:
                same_trees(self.step(ours).alone(), Step(theirs).alone())

        compare(warm, warm)
        for other in (replace(warm, noise=1), replace(warm, room=(79, 79))):
            with pytest.raises(AssertionError):
                compare(warm, other)
        # Without noise, neither seeds nor positions matter to a trie.
        if not picked:
            cold = replace(GRAFTED, temperatures=(0.0, 0.0))
            compare(cold, replace(cold, noise=1, room=(79, 79)))

    @pytest.mark.parametrize("forwards", [0, 2, 4])
    def test_growth_may_end_after_any_forward_and_be_captured_apart(self, forwards: int) -> None:
        ours = self.step(GRAFTED).run(forwards=forwards, apart=True)
        same(ours, Step(GRAFTED).run(forwards=forwards))

    @pytest.mark.parametrize("case", [GRAFTED, GRAFTED_HEAD], ids=["draft", "head"])
    def test_memory_is_left_ready_for_the_next_step(self, case: Case) -> None:
        same(self.step(case).run(replace(case, seed=7).logits()).run(), by_oracle(case))

    def test_a_step_without_a_trie_has_no_nodes_of_the_last_one(self) -> None:
        plain, logits = grafted(grafts=0), GRAFTED.logits()
        ours = self.step(GRAFTED).run(logits)
        ours.case = plain
        same(ours.run(logits), Step(plain).run(logits))
        assert ours.kinds() == {DRAFT}

    def test_a_trie_may_hold_anything_where_no_node_exists(self) -> None:
        trie = GRAFTED.trie()
        junk = Trie(
            torch.where(trie.exists, trie.tokens, -(10**6)),
            torch.where(trie.exists, trie.above, 10**6),
            torch.where(trie.exists, trie.evidence, torch.nan),
            trie.exists,
        )
        assert not trie.exists.all()
        same_trees(self.step(GRAFTED).start().graft(junk).finish(), Step(GRAFTED).alone())

    def test_a_node_without_evidence_does_not_exist(self) -> None:
        trie = GRAFTED.trie()
        nothing = trie._replace(evidence=trie.evidence * torch.nan)
        step = self.step(GRAFTED).start().graft(nothing).finish()
        assert step.tree().counts.tolist() == [0, 0]

    @pytest.mark.parametrize("broken", BROKEN)
    def test_a_row_without_a_distribution_judges_nothing(self, broken: float) -> None:
        logits = GRAFTED.logits()
        for each, row in ((logits[0], 0), (logits[1], 3), (logits[2], 1)):
            each[row, slice(None) if broken < 0 else 7] = broken
        ours = self.step(GRAFTED).run(logits)
        same(ours, Step(GRAFTED).run(logits))
        assert ours.tree().counts[0] > 0

    def test_a_token_that_the_draft_does_not_know_is_judged_as_unlikely(self) -> None:
        """A target may have more tokens than its draft."""
        trie = Trie.room(2, GRAFTED.shape.grafts, CPU)
        trie.tokens[:, :2], trie.exists[:, :2] = torch.tensor([10**6, 3]), True
        step = self.step(GRAFTED).start().graft(trie)
        step.pick(GRAFTED.logits()[0])
        step.finish()
        for tokens, slot in zip(step.tokens, step.slots.tolist(), strict=True):
            judged = dict(
                zip(tokens.tolist(), step.stored("features")[slot, :, 0].tolist(), strict=True)
            )
            assert judged[10**6] == -20 < judged[3]

    @pytest.mark.parametrize("size", [15, 17, 0])
    def test_a_trie_of_another_size_is_refused(self, size: int) -> None:
        step = self.step(GRAFTED).start()
        with pytest.raises(ValueError, match=rf"trie.tokens \(2, {size}\)"):
            step.graft(Trie.room(2, size, CPU))
        with pytest.raises(ValueError, match=r"trie.tokens \(2, 16\)"):
            self.step(CASE).start().graft(Trie.room(2, 16, CPU))
