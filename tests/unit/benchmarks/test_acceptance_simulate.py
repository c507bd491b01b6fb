"""Simulated decoding: its counts, and the measurements before it."""

from __future__ import annotations

import pytest
import torch
from acceptance_models import CPU, in_rows, some_prompts

from benchmarks.acceptance import drafting
from benchmarks.acceptance.calibrate import learn_values, positional_acceptance
from benchmarks.acceptance.drafting import Grown, Requests, grow
from benchmarks.acceptance.methods import METHODS, Setting
from benchmarks.acceptance.models import Decoder
from benchmarks.acceptance.simulate import Counts, simulate
from benchmarks.acceptance.step_times import StepTimes
from benchmarks.acceptance.texts import write
from benchmarks.acceptance.verifying import Blocks, Replay, Verifier, Walk
from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.children import ChildPicker
from dyntree_plugin.tree.papers.rules import DRAWN_RULES
from dyntree_plugin.tree.perturb import perturb_on
from dyntree_plugin.tree.value import AcceptanceEstimate

TOKENS = 20
DEPTH = 6


def counts_of(method: str, temperature: float, *noises: float, budget: int = 16) -> Counts:
    """Return the counts of a cell whose drafts are the target with so much noise in its weights."""
    prompts = some_prompts(5, 3, 8, 4)
    setting = Setting(budget, temperature, DEPTH, (0.6, 0.2, 0.1), len(noises))
    plan = METHODS[method].plan(setting)
    pick = ChildPicker(plan, perturb_on(CPU), AcceptanceEstimate("cpu"))
    text = write(in_rows(), prompts, temperature, TOKENS + DEPTH + 1)
    verifier: Verifier = Replay(text)
    if METHODS[method].block:
        verifier = Blocks(in_rows(), prompts, temperature, 60)
    elif plan.rule != "match":
        verifier = Walk(in_rows(), prompts, DRAWN_RULES[plan.rule], temperature, 60)
    drafts = [in_rows(noise) for noise in noises]
    return simulate(plan, pick, drafts, prompts, verifier, temperature, TOKENS)


@pytest.mark.parametrize(
    ("method", "temperature"), [("chain", 0.0), ("chain", 1.0), ("block", 1.0), ("sequoia", 0.7)]
)
def test_a_draft_that_is_the_target_is_accepted_down_to_the_last_node(
    method: str, temperature: float
) -> None:
    counts = counts_of(method, temperature, 0.0)
    reached = counts.lengths.nonzero().max()
    assert counts.lengths[reached] == counts.steps, "every step must go equally deep"
    assert counts.tokens == counts.steps * (int(reached) + 1)
    assert counts.lengths[-1] == counts.steps or method == "sequoia"
    far = counts_of(method, temperature, 3.0)
    assert far.tokens / far.steps < 0.7 * counts.tokens / counts.steps


def test_coupling_finds_the_draw_that_a_draft_alone_cannot_foretell() -> None:
    coupled, alone = (counts_of(method, 1.0, 0.1) for method in ("coupled", "topk"))
    assert coupled.tokens / coupled.steps > 1.3 * alone.tokens / alone.steps


def test_what_is_counted_adds_up() -> None:
    counts = counts_of("calibrated", 1.0, 0.2)
    depths = torch.arange(DEPTH + 1)
    assert counts.tokens == int((counts.lengths * (depths + 1)).sum())
    assert counts.steps == int(counts.lengths.sum())
    assert counts.nodes == int(counts.nodes_at.sum()) == int(counts.paths[:, 0].sum())
    accepted = int((counts.lengths * depths).sum())
    assert int(counts.edges[:, 2].sum()) == int(counts.paths[:, 2].sum()) == accepted
    judged = int(counts.edges[:, 0].sum())
    assert accepted < judged < counts.nodes
    assert counts.steps <= counts.forwards <= DEPTH * counts.steps
    assert counts.tokens >= 4 * (TOKENS - 1)
    both = counts_of("calibrated", 1.0, 0.2)
    both += counts
    assert both.tokens == 2 * counts.tokens
    assert torch.equal(both.edges, 2 * counts.edges)


@pytest.mark.parametrize("growth", ["dyspec", "threshold"])
@pytest.mark.parametrize("max_depth", [3, DEPTH])
def test_rows_that_are_left_out_leave_the_tree_as_it_is(
    growth: str, max_depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds at temperature 0, where no noise depends on the order of expansions."""
    prompts = some_prompts(5, 3, 8, 4)
    options = {"growth": growth, "rule": "match", "max_depth": max_depth, "width": 16}
    plan = DynTreeOptions.parse(options | {"children": 6, "calibration": "off"}).resolve(64)
    pick = ChildPicker(plan, perturb_on(CPU), AcceptanceEstimate("cpu"))

    def grown() -> Grown:
        decoder = Decoder(in_rows(), len(prompts), 12)
        logits = decoder.append(prompts.tokens, prompts.lengths)
        with torch.inference_mode():
            return grow(plan, pick, decoder, logits / 3, Requests(prompts.seeds, 0.0))

    monkeypatch.setattr(drafting, "_SLOT_WIDTHS", (5, 5))
    thrifty = grown()
    monkeypatch.setattr(drafting, "_thrifty", lambda plan: plan.growing)
    ordinary = grown()
    assert int(thrifty.expanded.sum()) <= int(ordinary.expanded.sum())
    assert int(ordinary.tree.depths.max()) == min(max_depth, int(thrifty.tree.depths.max()))
    assert nodes_of(thrifty) == nodes_of(ordinary)


def nodes_of(grown: Grown) -> list[set[tuple[int, ...]]]:
    """Return every tree as the paths of its nodes."""
    found = []
    for row in range(len(grown.tree.counts)):
        paths: list[tuple[int, ...]] = []
        for node in range(int(grown.tree.counts[row])):
            parent = int(grown.tree.parents[row, node])
            above = paths[parent] if parent >= 0 else ()
            paths.append((*above, int(grown.tree.tokens[row, node])))
        found.append(set(paths))
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_positional_acceptance_is_sure_of_a_perfect_draft_and_measures_another(
    temperature: float,
) -> None:
    prompts = some_prompts(5, 3, 8, 4)
    text = write(in_rows(), prompts, temperature, 30)
    perfect = positional_acceptance(in_rows(), in_rows(), prompts, text, temperature)
    assert perfect[0] == pytest.approx(1.0, abs=1e-4)
    assert sum(perfect[1:]) < 1e-3
    other = positional_acceptance(in_rows(), in_rows(0.4), prompts, text, temperature)
    assert other[0] < 0.95
    assert 0 < sum(other) <= 1 + 1e-6
    assert list(other) == sorted(other, reverse=True)
    assert min(other) > 0


def test_positional_acceptance_foretells_how_often_the_first_child_is_accepted() -> None:
    prompts = some_prompts(*[4] * 24)
    text = write(in_rows(), prompts, 0.8, 60)
    foretold = positional_acceptance(in_rows(), in_rows(0.3), prompts, text, 0.8)[0]
    plan = METHODS["chain"].plan(Setting(1, 0.8, 1, ()))
    pick = ChildPicker(plan, perturb_on(CPU), AcceptanceEstimate("cpu"))
    walk = Walk(in_rows(), prompts, DRAWN_RULES["without_replacement"], 0.8, 80)
    counts = simulate(plan, pick, [in_rows(0.3)], prompts, walk, 0.8, 60)
    assert int(counts.lengths[1]) / counts.steps == pytest.approx(foretold, abs=0.06)
    assert 0.2 < foretold < 0.9


def test_values_are_learned_from_what_was_accepted() -> None:
    prompts, setting = some_prompts(5, 3, 8, 4), Setting(16, 1.0, DEPTH, ())
    text = write(in_rows(), prompts, 1.0, TOKENS + DEPTH + 1)
    sure, unsure = (
        learn_values([in_rows(noise)], prompts, text, METHODS["calibrated"], setting, rounds=1)
        for noise in (0.0, 3.0)
    )
    even = torch.zeros(1, 1, 2)
    kind = torch.tensor([5])
    untaught = AcceptanceEstimate("cpu")
    assert float(unsure.log_chance(even, kind)) < float(untaught.log_chance(even, kind))
    assert float(sure.log_chance(even, kind)) > float(unsure.log_chance(even, kind))


@pytest.mark.parametrize(
    ("method", "temperature"), [("pool", 0.0), ("pool_with_look_up", 1.0), ("merged", 1.0)]
)
def test_a_pool_is_nearly_as_good_as_its_best_draft(method: str, temperature: float) -> None:
    """A pool of one draft that is right and one that is not, against each of them twice."""
    right, mixed, wrong = (
        counts_of(method, temperature, *noises) for noises in ((0.0, 0.0), (0.0, 9.0), (9.0, 9.0))
    )
    per_step = [counts.tokens / counts.steps for counts in (right, mixed, wrong)]
    assert per_step == sorted(per_step, reverse=True)
    assert per_step[1] > 1.5 * per_step[2]


def test_every_draft_of_a_pool_is_counted() -> None:
    """Drafts that agree grow the tree of one; apart, each runs on its own nodes alone."""
    one, mixed = (counts_of(*each) for each in (("topk", 0.0, 0.2), ("pool", 0.0, 0.2, 0.2)))
    assert mixed.forwards / mixed.steps == 2 * one.forwards / one.steps
    assert mixed.expanded / mixed.steps == 2 * one.expanded / one.steps
    apart = counts_of("merged", 0.0, 0.2, 0.2)
    single = counts_of("expansion", 0.0, 0.2, budget=8)
    assert apart.tokens == single.tokens
    assert apart.nodes == single.nodes
    assert (apart.forwards, apart.expanded) == (2 * single.forwards, 2 * single.expanded)


def test_modelled_speedup_divides_the_tokens_by_the_time_of_their_step() -> None:
    times = StepTimes({1: 10.0, 17: 12.0, 33: 20.0}, {1: 1.0, 5: 2.0}, "given")
    assert times.speedup(tokens=4, nodes=16, forwards=3, expanded=9) == pytest.approx(
        4 * 10 / (12 + 3 * 1.5)
    )
    assert times.speedup(tokens=1, nodes=0, forwards=1, expanded=1) == pytest.approx(10 / 11)
    beyond = times.speedup(tokens=4, nodes=64, forwards=1, expanded=1)
    assert beyond == pytest.approx(4 * 10 / (20 + 32 * 0.5 + 1))
