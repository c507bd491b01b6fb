"""Growth on the device takes tries as growth on the CPU and on tensors does.

It runs on a GPU or in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_cases import DEVICE

pytest.importorskip("numba", reason="it compares with the CPU's kernels, which need numba")

from growth_steps import (
    CASE,
    Case,
    Step,
    grown,
    on_cpu,
    on_device,
    runs_parents,
    same,
    same_as_tensors,
    same_trees,
)

from dyntree_kernels.contracts import BESIDE, BOTH, DRAFT, LOOK_UP
from dyntree_kernels.cuda import growth
from dyntree_kernels.cuda.growth import DeviceGrowth
from dyntree_kernels.tries import Trie
from dyntree_plugin.tree.growth.topk import TopKGrowth
from dyntree_plugin.tree.shape import TreeShape

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of -inf and NaN

SHAPE = TreeShape(node_budget=24, max_depth=5, width=4, children=2, grafts=16)
USUAL = replace(CASE, shape=SHAPE)
LARGE = replace(USUAL, shape=TreeShape(40, 6, width=9, children=3, grafts=40))
CASES = {
    "usual": USUAL,
    **{f"usual {seed}": replace(USUAL, seed=seed, temperatures=(0.3, 1.0)) for seed in (1, 3)},
    "several words of bits": LARGE,
    "several words of bits, and a small budget": replace(
        LARGE, shape=replace(LARGE.shape, node_budget=12), seed=4
    ),
    "deeper than the forwards": replace(USUAL, shape=replace(SHAPE, max_depth=9, max_forwards=3)),
    "shallow": replace(USUAL, shape=replace(SHAPE, max_depth=2)),
    "only the root is expanded": replace(USUAL, shape=replace(SHAPE, max_forwards=1)),
    "one node": replace(USUAL, shape=replace(SHAPE, grafts=1)),
    "the largest tries": replace(USUAL, shape=replace(SHAPE, grafts=64, node_budget=80)),
    "one child": replace(USUAL, shape=TreeShape(16, 5, width=1, children=1, grafts=12)),
    "little room": replace(USUAL, room=(4, 0)),
    "chained": replace(USUAL, chained=(1,)),
    "little left": replace(USUAL, levels=(1, 3)),
    "a least value": replace(USUAL, least=0.05),
    "only the root's best child is worth enough": replace(USUAL, least=0.999),
    "uncalibrated": replace(USUAL, calibrated=False),
    "uncoupled": replace(USUAL, shape=replace(SHAPE, coupling=False), temperatures=(0.5, 1.0)),
    "many blocks": replace(USUAL, vocab=5000),
    "16 bits": replace(USUAL, dtype=torch.float16),
}
HEADS = (
    *("usual", "usual 1", "several words of bits, and a small budget", "chained"),
    *("deeper than the forwards", "little room", "little left", "uncalibrated"),
)
CASES |= {
    f"a head: {name}": replace(CASES[name], shape=replace(CASES[name].shape, head=True))
    for name in HEADS
}


@pytest.mark.parametrize("name", CASES)
def test_the_trees_are_those_of_the_cpus_growth(name: str) -> None:
    same(grown(CASES[name]), on_cpu(CASES[name]).run())


@pytest.mark.parametrize("name", CASES)
def test_the_same_picks_grow_the_trees_of_the_tensors_growth(name: str) -> None:
    same_as_tensors(grown(CASES[name]))


@pytest.mark.parametrize(
    "name",
    ["usual", "several words of bits", "shallow", "chained", "a least value", "uncalibrated"],
)
def test_a_trie_makes_a_tree_without_any_pick(name: str) -> None:
    ours = on_device(CASES[name]).alone()
    same_trees(ours, on_cpu(CASES[name]).alone())
    assert set(kinds_of(ours)) == {LOOK_UP}


def kinds_of(step: Step) -> list[int]:
    """Return the kinds of all nodes of the step's trees."""
    there = step.tree().values > float("-inf")
    kinds: list[int] = step.stored("kinds")[step.slots.cpu()][there].tolist()
    return kinds


def test_the_trees_have_nodes_of_every_kind() -> None:
    kinds = [kind for name in CASES for kind in kinds_of(grown(CASES[name]))]
    assert set(kinds) == {DRAFT, LOOK_UP, BOTH, BESIDE}


@pytest.mark.parametrize("name", HEADS)
def test_no_forward_of_a_head_runs_a_node_and_its_child(name: str) -> None:
    assert not runs_parents(grown(CASES[f"a head: {name}"]))


def test_a_draft_model_runs_a_node_and_its_child_in_one_forward() -> None:
    """Control of the test above."""
    assert runs_parents(grown(USUAL))


def test_tensors_that_run_a_node_and_its_child_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control of the comparison with tensors: they grow a head's trees as a draft model's."""
    stock = TopKGrowth.graft
    monkeypatch.setattr(TopKGrowth, "graft", lambda self, *given, whole_paths: stock(self, *given))
    with pytest.raises(AssertionError):
        same_as_tensors(grown(CASES["a head: usual"]))


def test_no_node_has_two_children_of_one_token() -> None:
    for case in CASES.values():
        tree = grown(case).tree()
        for parents, tokens, count in zip(tree.parents, tree.tokens, tree.counts, strict=True):
            edges = [*zip(parents[:count].tolist(), tokens[:count].tolist(), strict=True)]
            assert len({*edges}) == len(edges)


def test_what_both_propose_is_one_node_which_the_draft_judges() -> None:
    trie = Trie.room(2, SHAPE.grafts, DEVICE)
    trie.tokens[:, :2], trie.exists[:, :2] = torch.tensor([7, 8]), True
    step = on_device(replace(USUAL, temperatures=(0.0, 0.0)))
    step.start()
    step.growth.graft(trie)
    logits = torch.zeros(2, step.case.vocab)
    logits[:, [7, 9]] = torch.tensor([9.0, 8.0])
    step.growth.pick(logits.to(DEVICE))
    step.tokens = step.growth.finish().cpu()
    for row, slot in enumerate(step.slots.cpu()):
        kinds = step.stored("kinds")[slot, :3].tolist()
        assert step.trees.counts[slot] == 3
        assert dict(zip(step.tokens[row, :3].tolist(), kinds, strict=True)) == {
            7: BOTH,
            8: BOTH,
            9: BESIDE,
        }


Change = Callable[[DeviceGrowth], None]


def other_tokens(growth: DeviceGrowth) -> None:
    """Let the draft find other tokens in the trie than it proposes itself."""
    growth.candidates.tokens[:, : SHAPE.grafts] += 20


def without_expansions(growth: DeviceGrowth) -> None:
    """Forget which nodes were expanded, so that the draft judges the root's children alone."""
    assert growth._grafts.expansions is not None
    growth._grafts.expansions.fill_(-1)


def other_evidence(growth: DeviceGrowth) -> None:
    assert growth._grafts.evidence is not None
    growth._grafts.evidence.add_(1)


def other_edges(growth: DeviceGrowth) -> None:
    """Let nodes seem not to exist: the draft does not judge them."""
    assert growth._grafts.edges is not None
    growth._grafts.edges[:, ::2] = float("-inf")


@pytest.mark.parametrize("change", [other_tokens, without_expansions, other_evidence, other_edges])
def test_a_merge_or_a_judgement_that_is_broken_is_seen(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the comparison with the CPU."""
    stock = DeviceGrowth.pick

    def pick(self: DeviceGrowth, logits: torch.Tensor) -> None:
        change(self)
        stock(self, logits)

    monkeypatch.setattr(DeviceGrowth, "pick", pick)
    with pytest.raises((AssertionError, ValueError)):
        same(on_device(USUAL).run(), on_cpu(USUAL).run())


@pytest.mark.parametrize("picked", [True, False])
def test_the_noise_is_that_of_the_requests_seed_at_the_nodes_depth(picked: bool) -> None:
    warm = replace(USUAL, temperatures=(0.7, 1.0))

    def compare(ours: Case, theirs: Case) -> None:
        if picked:
            same(grown(ours), on_cpu(theirs).run())
        else:
            same_trees(on_device(ours).alone(), on_cpu(theirs).alone())

    compare(warm, warm)
    for other in (replace(warm, noise=1), replace(warm, room=(79, 79))):
        with pytest.raises(AssertionError):
            compare(warm, other)
    # Without noise, neither seeds nor positions matter to a trie.
    if not picked:
        cold = replace(USUAL, temperatures=(0.0, 0.0))
        compare(cold, replace(cold, noise=1, room=(79, 79)))


@pytest.mark.parametrize("forwards", [None, 0, 2, 4])
def test_growth_may_end_behind_any_forward_and_be_captured_apart(forwards: int | None) -> None:
    """``forwards`` None: there is no pick, as without a draft."""
    ours, theirs = on_device(USUAL), on_cpu(USUAL)
    for step in (ours, theirs):
        step.start()
        for at, logits in enumerate(USUAL.logits()[: 0 if forwards is None else 1 + forwards]):
            if at > 0:
                if step is ours:
                    step.growth.resume(1, 4)
                    step.growth.resume(USUAL.requests, at - 1)
                step.growth.expand(
                    torch.zeros(len(logits), 1, dtype=torch.int32, device=step.device)
                )
            step.growth.pick(logits.to(step.device))
    ours.growth.resume(1, 4)
    ours.growth.resume(USUAL.requests, forwards or 0)
    for step in (ours, theirs):
        step.tokens = step.growth.finish().cpu()
    same_trees(ours, theirs)


def test_a_step_with_tries_takes_one_more_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: Any = type(growth._expand)
    stock, launches = kernels.run, []

    def run(self: Any, *args: Any, **settings: Any) -> Any:
        launches.append(self)
        return stock(self, *args, **settings)

    monkeypatch.setattr(kernels, "run", run)
    numbers = []
    for grafts in (0, SHAPE.grafts):
        launches.clear()
        on_device(replace(USUAL, shape=replace(SHAPE, grafts=grafts))).run()
        numbers.append(len(launches))
    forwards = len(USUAL.plan.growing.widths)
    assert numbers == [2 + 3 * forwards + 2, 1 + 2 + 3 * forwards + 2]


def test_memory_is_left_ready_for_the_next_step() -> None:
    other = replace(USUAL, seed=7)
    ours = on_device(other).run()
    ours.case = USUAL
    ours.estimate.weights.copy_(on_device(USUAL).estimate.weights)
    same(ours.run(), grown(USUAL))


def test_a_step_without_a_trie_has_no_nodes_of_the_last_one() -> None:
    plain = replace(USUAL, shape=replace(SHAPE, grafts=0))
    logits = USUAL.logits()
    ours, theirs = on_device(USUAL).run(), on_device(plain).run(logits)
    ours.case = plain
    ours.run(logits)
    assert set(kinds_of(ours)) == {DRAFT}
    same(ours, theirs)


def test_a_trie_may_hold_anything_where_no_node_exists() -> None:
    trie, step = USUAL.trie(), on_device(USUAL)
    step.start()
    junk = Trie(
        torch.where(trie.exists, trie.tokens, -(10**6)),
        torch.where(trie.exists, trie.above, 10**6),
        torch.where(trie.exists, trie.evidence, torch.nan),
        trie.exists,
    )
    assert not trie.exists.all()
    step.growth.graft(Trie(*(part.to(DEVICE) for part in junk)))
    step.tokens = step.growth.finish().cpu()
    same_trees(step, on_cpu(USUAL).alone())


def test_a_node_without_evidence_does_not_exist() -> None:
    step = on_device(USUAL)
    step.start()
    trie = USUAL.trie()
    step.growth.graft(
        Trie(*(part.to(DEVICE) for part in trie._replace(evidence=trie.evidence * torch.nan)))
    )
    step.growth.finish()
    assert step.trees.counts[step.slots].tolist() == [0, 0]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_a_distribution_judges_nothing(broken: float) -> None:
    logits = USUAL.logits()
    for each, row in ((logits[0], 0), (logits[1], 3), (logits[2], 1)):
        each[row, slice(None) if broken < 0 else 7] = broken
    ours = on_device(USUAL).run(logits)
    same(ours, on_cpu(USUAL).run(logits))
    same_as_tensors(ours)
    assert ours.trees.counts[1] > 0


def test_a_token_that_the_draft_does_not_know_is_judged_as_unlikely() -> None:
    trie = Trie.room(2, SHAPE.grafts, DEVICE)
    trie.tokens[:, 0] = 10**6
    trie.exists[:, 0] = True
    step = on_device(USUAL)
    step.start()
    step.growth.graft(trie)
    step.growth.pick(USUAL.logits()[0].to(DEVICE))
    assert step.growth.candidates.features[:2, 0, 0].tolist() == [-20.0, -20.0]


@pytest.mark.parametrize("size", [SHAPE.grafts - 1, SHAPE.grafts + 1, 0])
def test_a_trie_of_another_size_is_refused(size: int) -> None:
    step = on_device(USUAL)
    step.start()
    with pytest.raises(ValueError, match=rf"trie.tokens \(2, {size}\)"):
        step.growth.graft(Trie.room(2, size, DEVICE))
    with pytest.raises(ValueError, match=r"trie.tokens \(2, 16\)"):
        on_device(CASE).growth.graft(Trie.room(2, 16, DEVICE))
