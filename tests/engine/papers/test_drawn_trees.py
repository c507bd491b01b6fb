"""Drawn trees through the engine's growth and walk: the law of whole texts, over many steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from growth_steps import growth_of
from test_chains import (
    DRAFT,
    FIRST,
    LENGTH,
    PLAN,
    RUNS,
    SURELY_BIASED,
    TARGET,
    UNSUSPICIOUS,
    VOCABULARY,
    Engine,
    p_value,
)

from dyntree_kernels.contracts import BatchRows, Drawing
from dyntree_kernels.cpu import growth as cpu_growth
from dyntree_kernels.cpu.drawn import decide_trees, draw_children
from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_kernels.cpu.gumbel import gumbel_noise
from dyntree_kernels.drawn import DrawnTrees
from dyntree_plugin.engine.papers.chain_samples import TreeSamples
from dyntree_plugin.engine.papers.draw_store import DrawStore
from dyntree_plugin.tree import noise
from dyntree_plugin.tree.budget.chains import valued_counts
from dyntree_plugin.tree.noise import uniform
from dyntree_plugin.tree.papers.drawn import draw
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.traversal import traverse

TREES = replace(PLAN, shape=TreeShape(node_budget=5, max_depth=3, width=2, children=2))


def seeds_of(seeds: torch.Tensor, expansions: torch.Tensor) -> torch.Tensor:
    return noise.stream(seeds, noise.DRAFT, expansions)


@dataclass
class Trees(Engine):
    """As `Engine`, with drawn trees."""

    plan: TreePlan = TREES
    cut: ClassVar[Any] = staticmethod(valued_counts)

    def draw(self, count: int) -> None:
        self.draws = DrawStore(count, self.plan, VOCABULARY, torch.device("cpu"), trees=True)
        drawing = Drawing(self.draws.laws, self.draws.origins, seeds_of)
        self.growth = growth_of(CompiledGrowth, self.trees, self.memory, self.estimate, drawing)
        self.samples = TreeSamples(self.trees, self.draws, decide_trees)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("ends", [False, True])
def test_texts_follow_the_target_over_many_steps(ends: bool) -> None:
    engine = Trees(torch.ones(RUNS), ends=ends)
    assert p_value(engine.texts()) > UNSUSPICIOUS
    branches = engine.trees.counts - engine.trees.depths.amax(dim=1)
    assert branches.double().mean() > 1


def test_trees_that_are_cut_by_what_they_drew_are_noticed() -> None:
    assert p_value(Trees(torch.ones(RUNS), peeks=True).texts()) < SURELY_BIASED


def test_values_that_tell_of_the_own_draw_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth keeps the most valuable nodes, so it would keep some tokens more often."""

    def by_token(*arguments: Any) -> None:
        draw_children(*arguments)
        *_, tokens, edges, _, _ = arguments
        edges -= tokens

    monkeypatch.setattr(cpu_growth, "draw_children", by_token)
    assert p_value(Trees(torch.ones(RUNS)).texts()) < SURELY_BIASED


def test_a_token_of_the_target_in_place_of_the_residual_is_noticed() -> None:
    def from_the_target(rows: BatchRows, logits: torch.Tensor, trees: DrawnTrees) -> None:
        decide_trees(rows, logits, trees)
        assert rows.forbidden is not None
        # The parents of what is forbidden were accepted last, and have a residual.
        nodes = TREES.shape.node_budget + 1
        request, row = rows.forbidden.view(-1, nodes).nonzero(as_tuple=True)
        above = request * nodes + trees.parents[request, row - 1] + 1
        keys = trees.emitting[request], rows.positions[request * nodes]
        rows.sampled[above] = draw(logits[above].softmax(1), gumbel_noise(*keys, VOCABULARY))

    engine = Trees(torch.ones(RUNS))
    with mock.patch.object(engine.samples, "_decide", from_the_target):
        assert p_value(engine.texts()) < SURELY_BIASED


def test_another_distribution_than_that_of_the_draws_is_noticed() -> None:
    def even(rows: BatchRows, logits: torch.Tensor, trees: DrawnTrees) -> None:
        decide_trees(rows, logits, trees._replace(laws=torch.full_like(trees.laws, 1 / 3)))

    engine = Trees(torch.ones(RUNS))
    with mock.patch.object(engine.samples, "_decide", even):
        assert p_value(engine.texts()) < SURELY_BIASED


def in_torch(rows: BatchRows, logits: torch.Tensor, trees: DrawnTrees) -> None:
    """Decide by `traverse`, for requests that all have drawn trees."""
    slots, top = rows.requests[:, 0], rows.requests[:, 1]
    parents, origins = trees.parents[slots], trees.origins[slots]
    count, nodes = parents.shape
    counts = torch.minimum(rows.requests[:, 2], trees.counts[slots])
    at = top[:, None] + torch.arange(nodes + 1)
    real = torch.arange(nodes) < counts[:, None]
    tokens = torch.where(real, rows.ids[at[:, 1:]].long(), 0)
    request = torch.arange(count)[:, None]
    log_draft = torch.zeros(count, nodes + 1, logits.shape[1])
    laws = trees.laws[slots[:, None], torch.where(real, origins, 0)]
    for node in range(nodes):
        above = parents[:, node] + 1
        of_node = torch.where(real[:, node, None], laws[:, node].log(), 0)
        log_draft[request[:, 0], above] += of_node * (log_draft[request[:, 0], above] == 0)
    found = traverse(tokens, parents, counts, log_draft, logits[at].softmax(2).double())
    position = rows.positions[top]
    last = found.accepted(uniform(gumbel_noise(trees.accepting, position, nodes + 1)))
    law = found.residual[request[:, 0], last].float()
    rows.sampled[top + last] = draw(law, gumbel_noise(trees.emitting, position, law.shape[1]))
    path = found.path_to(last, trees.levels)
    on_path = torch.zeros(count, nodes + 1, dtype=torch.bool)
    on_path.scatter_(1, (path + 1).clamp(min=0), True)[:, 0] = False
    inner = on_path[:, 1:]
    r, n = inner.nonzero(as_tuple=True)
    rows.sampled[top[r] + parents[r, n] + 1] = tokens[r, n]
    assert rows.forbidden is not None
    r, n = (real & (parents + 1 == last[:, None])).nonzero(as_tuple=True)
    rows.forbidden[top[r] + n + 1] = True


def test_the_kernel_decides_as_the_rule_in_torch() -> None:
    count = 3000
    compiled, plain = Trees(torch.ones(count)), Trees(torch.ones(count))
    with mock.patch.object(plain.samples, "_decide", in_torch):
        for start in range(4):
            last, roots = torch.full((count,), start % VOCABULARY), torch.full((count,), 7 + start)
            tokens, emitted = compiled.step(last, roots)
            wanted, lengths = plain.step(last, roots)
            same = (emitted == lengths) & (tokens == wanted).all(dim=1)
            assert same.double().mean() > 0.999  # a uniform may lie within rounding of its chance
            assert len(emitted.unique()) == TREES.shape.max_depth + 1


def test_a_decision_leaves_the_distributions_as_they_are() -> None:
    engine = Trees(torch.ones(200))
    engine.grow(torch.zeros(200).long(), torch.full((200,), FIRST))
    before = engine.draws.laws.clone()
    engine.step(torch.zeros(200).long(), torch.full((200,), FIRST))
    assert torch.equal(engine.draws.laws, before)


def test_children_are_drawn_without_replacement_from_what_is_stored() -> None:
    count = 20_000
    engine = Trees(torch.full((count,), 0.5))
    engine.grow(torch.zeros(count).long(), torch.full((count,), FIRST))
    law = (DRAFT[0] / 0.5).softmax(dim=0)
    torch.testing.assert_close(engine.draws.laws[:count, 0], law.expand(count, -1))
    first, second = torch.from_numpy(engine.growth.tokens[:count, 0]).unbind(1)
    there = torch.from_numpy(engine.growth.edges[:count, 0, 1]).isfinite()
    pairs = torch.bincount(first[there] * VOCABULARY + second[there], minlength=VOCABULARY**2)
    wanted = law[:, None] * law / (1 - law[:, None])
    wanted = wanted.fill_diagonal_(0).flatten()
    assert (pairs / count - wanted).abs().max() < 4 / count**0.5


def test_greedy_requests_beside_drawn_trees_get_the_targets_best_tokens() -> None:
    texts = Trees(torch.tensor([0.0, 1.0] * 50)).texts()[::2]
    wanted, last = [], 0
    for _ in range(LENGTH):
        last = int(TARGET[last].argmax())
        wanted.append(last)
    assert texts.tolist() == [wanted] * 50


def test_no_step_uses_the_noise_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, keys = Trees(torch.ones(40)), []

    def drawn(*arguments: Any) -> None:
        draw_children(*arguments)
        (first, width), seeds, positions = arguments[3], arguments[6], arguments[8]
        for own in seeds[first : first + width]:
            keys.extend(zip(own.tolist(), positions.tolist(), strict=True))

    def decided(rows: BatchRows, logits: torch.Tensor, trees: DrawnTrees) -> None:
        decide_trees(rows, logits, trees)
        positions = rows.positions[rows.requests[:, 3]].tolist()
        for own in (trees.accepting, trees.emitting):
            keys.extend(zip(own.tolist(), positions, strict=True))

    monkeypatch.setattr(cpu_growth, "draw_children", drawn)
    monkeypatch.setattr(engine.samples, "_decide", decided)
    engine.texts()
    assert len(keys) > 40 * 2 * 5
    assert len(set(keys)) == len(keys)
    # Control: with the same roots, the noise is the same.
    once = len(keys)
    engine.step(torch.zeros(40).long(), torch.full((40,), FIRST))
    assert len(set(keys)) == once
