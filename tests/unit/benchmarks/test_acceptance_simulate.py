"""Simulated decoding: its counts, and the measurements before it."""

from __future__ import annotations

import pytest
import torch
from acceptance_models import CPU, in_rows, some_prompts

from benchmarks.acceptance.calibrate import learn_values, positional_acceptance
from benchmarks.acceptance.methods import METHODS, Setting
from benchmarks.acceptance.simulate import Counts, simulate
from benchmarks.acceptance.texts import write
from benchmarks.acceptance.verifying import Blocks, Replay, Verifier, Walk
from dyntree_plugin.tree.children import ChildPicker
from dyntree_plugin.tree.perturb import perturb_on
from dyntree_plugin.tree.registry import DRAWN_RULES
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


def test_what_is_counted_adds_up() -> None:
    counts = counts_of("calibrated", 1.0, 0.2)
    depths = torch.arange(DEPTH + 1)
    assert counts.tokens == int((counts.lengths * (depths + 1)).sum())
    assert counts.steps == int(counts.lengths.sum())
    assert int((counts.lengths * depths).sum()) < counts.nodes <= 16 * counts.steps
    assert counts.steps <= counts.forwards <= DEPTH * counts.steps
    assert counts.tokens >= 4 * (TOKENS - 1)
    both = counts_of("calibrated", 1.0, 0.2)
    both += counts
    assert both.tokens == 2 * counts.tokens
    assert torch.equal(both.lengths, 2 * counts.lengths)


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


@pytest.mark.parametrize(("method", "temperature"), [("pool", 0.0), ("pool_with_look_up", 1.0)])
def test_a_pool_is_nearly_as_good_as_its_best_draft(method: str, temperature: float) -> None:
    """A pool of one draft that is right and one that is not, against each of them twice."""
    right, mixed, wrong = (
        counts_of(method, temperature, *noises) for noises in ((0.0, 0.0), (0.0, 9.0), (9.0, 9.0))
    )
    per_step = [counts.tokens / counts.steps for counts in (right, mixed, wrong)]
    assert per_step == sorted(per_step, reverse=True)
    assert per_step[1] > 1.5 * per_step[2]
