"""Drawn chains and trees through the engine's growth and walk: the law of whole texts, over many
steps. `test_drawn_trees` has what is broken in trees alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
from growth_steps import growth_of, memory_of
from noted_kernels import Kernel
from scipy.stats import chisquare

from dyntree_kernels.contracts import BatchRows, RequestParams, Walked, allocate
from dyntree_kernels.cpu.drawn import decide_trees
from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_kernels.cpu.walk import walk
from dyntree_kernels.drawn import DecideTrees, DrawnTrees
from dyntree_plugin.engine.drawn.samples import DrawnSamples, SamplesWalk
from dyntree_plugin.engine.drawn.store import DrawStore
from dyntree_plugin.engine.step.requests import COLUMNS, Requests
from dyntree_plugin.engine.step.sampled_walk import SampledWalk
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.engine.step.verify import TreeVerifier
from dyntree_plugin.tree.budget.choice import frontier_gain
from dyntree_plugin.tree.budget.drawn import valued_counts
from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class

VOCABULARY, DEPTH, LENGTH, FIRST = 3, 3, 5, 7
"""Tokens; of a chain; of the texts whose law is tested; and the position of their root."""
PLAN = TreePlan(
    TreeShape(node_budget=4, max_depth=DEPTH, width=2, children=2),
    GrowthConfig(),
    "match",
    calibration=True,
    budget="adaptive",
    exactness="distribution",
)
TREES = replace(PLAN, shape=TreeShape(node_budget=5, max_depth=3, width=2, children=2))
SURELY_BIASED, UNSUSPICIOUS = 1e-6, 0.01
LEAST = np.full(5, 0.2)
"""Two trees or chains end at a node of less value, and after five nodes."""


def logits(seed: int) -> torch.Tensor:
    """Return the logits that a model has after each token, [V, V]."""
    return 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))


DRAFT, TARGET = logits(1), logits(2)


@dataclass
class Engine:
    """R requests, one step after another, with tables in place of models.

    ``ends``: whether chains end early, at limits. ``peeks``: whether they end by the tokens that
    they leave out. ``kept``: tokens of the draft's distributions.
    """

    temperatures: torch.Tensor
    ends: bool = False
    peeks: bool = False
    kept: int = VOCABULARY
    plan: TreePlan = PLAN
    chains: ClassVar[bool] = True

    def __post_init__(self) -> None:
        count = len(self.temperatures)
        self.seeds = torch.arange(count) * 7919 + 3
        self.estimate = AcceptanceEstimate("cpu")
        self.trees = TreeStore(count, self.plan, VOCABULARY, torch.device("cpu"))
        rows, columns = count * self.plan.shape.width, count * self.plan.scratch_slots
        self.memory = memory_of(count, rows, columns, last=500)
        self.draws = DrawStore(count, self.plan, VOCABULARY, torch.device("cpu"), self.kept)
        drawing = self.draws.drawing(chains=self.chains)
        self.growth = growth_of(CompiledGrowth, self.trees, self.memory, self.estimate, drawing)
        self.samples = DrawnSamples(self.trees, self.draws, decide_trees)
        nodes = self.plan.shape.node_budget
        self.buffers = SimpleNamespace(
            input_ids=torch.zeros(count * (nodes + 1), dtype=torch.int32),
            positions=torch.zeros(count * (nodes + 1), dtype=torch.int64),
            seq_lens=torch.full((count,), 1000, dtype=torch.int32),
        )

    def grow(self, last: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
        """Return the tokens of the trees below the tokens ``last`` at positions ``roots``."""
        count, width = len(last), self.plan.shape.width
        classes = temperature_class(self.temperatures)
        free = torch.zeros(count, dtype=torch.bool)
        far = torch.full_like(roots, 500)
        slots = torch.arange(count)
        self.memory.of_requests.fill(
            RequestParams(roots, self.temperatures, classes, self.seeds, free, far, slots)
        )
        self.growth.start(count)
        self.growth.pick(DRAFT[last])
        for _ in self.plan.growing.widths:
            self.growth.expand(torch.zeros(count * width, 1, dtype=torch.int32))
            self.growth.pick(DRAFT[self.memory.rows.ids[: count * width].long()])
        return self.growth.finish()

    def step(self, last: torch.Tensor, roots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the emitted tokens [R, DEPTH + 1] and how many they are, [R]."""
        tokens = self.grow(last, roots)
        count, nodes = tokens.shape
        room = self.trees.counts[:count]
        if self.ends:
            chances = self.trees.values[:count].exp().numpy()
            # A batch of its own for every two requests: a level of one tells of the other.
            pairs = [self.cut(pair) for pair in chances.reshape(-1, 2, nodes)]
            room = torch.from_numpy(np.concatenate(pairs))
        if self.peeks:
            room = torch.where(tokens[:, 1] == 0, 1, room)
        ids = torch.cat([last[:, None], tokens], dim=1).flatten()
        self.buffers.input_ids[:] = ids.int()
        depths = torch.nn.functional.pad(self.trees.depths[:count], (1, 0))
        self.buffers.positions[:] = (roots[:, None] + depths).flatten()
        scaled = TARGET[ids] / self._of_rows(self.temperatures).clamp(min=1e-9)[:, None]
        greedy = self._of_rows(self.temperatures) == 0
        processed = torch.where(greedy[:, None], TARGET[ids], scaled)
        sampled = processed.argmax(dim=1)  # of greedy requests; no other is read
        walked = self.walk(self._requests(room), sampled, processed)
        return walked.tokens, walked.emitted.long()

    @staticmethod
    def cut(chances: np.ndarray) -> np.ndarray:
        """Return how many tokens of chains are verified if drafting also ends by their values."""
        drafted = 1
        while drafted < DEPTH and frontier_gain(0.8 * chances[:, drafted - 1], 0.2) > 0.2:
            drafted += 1
        return valued_counts(chances[:, :drafted], LEAST)

    def walk(self, requests: Requests, sampled: torch.Tensor, processed: torch.Tensor) -> Walked:
        buffers, shape = self.buffers, self.plan.shape
        arrays = (sampled, buffers.input_ids, buffers.positions, buffers.seq_lens, None)
        rows = self.samples(requests, BatchRows(requests.packed, *arrays), processed)
        sizes = (shape.node_budget, shape.max_depth, sampled.device)
        walked = allocate(len(requests.packed), *sizes, ranked=True)
        walk(rows, self.trees.arrays, walked, ranked=True)
        return walked

    def _of_rows(self, of_requests: torch.Tensor) -> torch.Tensor:
        return of_requests.repeat_interleave(self.plan.shape.node_budget + 1)

    def _requests(self, room: torch.Tensor) -> Requests:
        count = len(room)
        packed = torch.zeros(count, COLUMNS, dtype=torch.int64)
        first = torch.arange(count) * (self.plan.shape.node_budget + 1)
        columns = (torch.arange(count), first, room, first)
        packed[:, : len(columns)] = torch.stack(columns, dim=1)
        packed[:, 5] = self.temperatures.view(torch.int32).long()
        packed[:, 6] = self.seeds
        return Requests(packed, self.trees.spare)

    def texts(self) -> torch.Tensor:
        """Return the first tokens that the requests emit behind token 0, [R, LENGTH]."""
        count = len(self.temperatures)
        last, roots = torch.zeros(count).long(), torch.full((count,), FIRST)
        texts = torch.zeros(count, LENGTH + 1, dtype=torch.int64)  # the last column is of no text
        while int((roots - FIRST).min()) < LENGTH:
            tokens, emitted = self.step(last, roots)
            places = torch.arange(self.plan.shape.max_depth + 1)
            at = (roots - FIRST)[:, None] + places
            at = torch.where(places < emitted[:, None], at, LENGTH).clamp(max=LENGTH)
            texts.scatter_(1, at, tokens)
            last = tokens.gather(1, emitted[:, None] - 1)[:, 0]
            roots = roots + emitted
        return texts[:, :LENGTH]


@dataclass
class Trees(Engine):
    """As `Engine`, with drawn trees."""

    plan: TreePlan = TREES
    cut: ClassVar[Any] = staticmethod(partial(valued_counts, least=LEAST))
    chains: ClassVar[bool] = False


KINDS = pytest.mark.parametrize("kind", [Engine, Trees], ids=["chains", "trees"])


def p_value(texts: torch.Tensor) -> float:
    """Return the p-value of the texts under the target at temperature 1."""
    law = TARGET.double().softmax(dim=1)
    expected, code = torch.ones(1, dtype=torch.float64), torch.zeros(len(texts)).long()
    states = torch.zeros(1).long()
    for place in range(texts.shape[1]):
        expected = (expected[:, None] * law[states]).flatten()
        states = torch.arange(VOCABULARY).repeat(len(states))
        code = code * VOCABULARY + texts[:, place]
    seen = torch.bincount(code, minlength=len(expected)).double()
    return float(chisquare(seen, expected * len(texts)).pvalue)


RUNS = 30_000


pytestmark = pytest.mark.usefixtures("one_thread")


@KINDS
@pytest.mark.parametrize(("ends", "kept"), [(False, VOCABULARY), (True, VOCABULARY), (True, 2)])
def test_texts_follow_the_target_over_many_steps(kind: type[Engine], ends: bool, kept: int) -> None:
    engine = kind(torch.ones(RUNS), ends=ends, kept=kept)
    assert p_value(engine.texts()) > UNSUSPICIOUS
    branches = engine.trees.counts - engine.trees.depths.amax(dim=1)
    assert (branches.double().mean() > 1) == (kind is Trees)


@KINDS
def test_ends_that_depend_on_the_tokens_that_they_leave_out_are_noticed(kind: type[Engine]) -> None:
    assert p_value(kind(torch.ones(RUNS), peeks=True).texts()) < SURELY_BIASED


def decided_by(engine: Engine, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Have an engine decide by other chances of the draft than it drew by."""

    def decide(rows: BatchRows, logits: torch.Tensor, trees: DrawnTrees) -> None:
        laws = trees.distributions._replace(chances=change(trees.distributions.chances))
        decide_trees(rows, logits, trees._replace(distributions=laws))

    return mock.patch.object(engine.samples, "_decide", decide)


@KINDS
def test_verification_by_another_law_than_that_of_the_draws_is_noticed(kind: type[Engine]) -> None:
    engine = kind(torch.ones(RUNS))
    with decided_by(engine, lambda chances: torch.full_like(chances, 1 / 3)):
        assert p_value(engine.texts()) < SURELY_BIASED


@KINDS
def test_greedy_requests_beside_what_is_drawn_get_the_targets_best_tokens(
    kind: type[Engine],
) -> None:
    temperatures = torch.tensor([0.0, 1.0] * 50)
    texts = kind(temperatures).texts()[::2]
    wanted, last = [], 0
    for _ in range(LENGTH):
        last = int(TARGET[last].argmax())
        wanted.append(last)
    assert texts.tolist() == [wanted] * 50


def test_tokens_behind_the_end_of_a_chain_are_not_looked_up() -> None:
    """The rows there are of other requests, and a prompt may hold ids of no token."""
    engine, last = Engine(torch.ones(3)), torch.zeros(3).long()
    engine.grow(last, torch.full((3,), FIRST))
    engine.buffers.input_ids[:] = VOCABULARY + 5
    processed = torch.zeros(len(engine.buffers.input_ids), VOCABULARY)
    nothing = torch.zeros(3, dtype=torch.int64)
    walked = engine.walk(engine._requests(nothing), processed.argmax(dim=1), processed)
    assert walked.emitted.tolist() == [1, 1, 1]


def test_greedy_requests_get_the_trees_that_they_get_without_chains() -> None:
    count = 6
    temperatures = torch.tensor([0.0, 1.0] * 3)
    last, roots = torch.arange(count) % VOCABULARY, torch.full((count,), FIRST)
    engine, alone = Engine(temperatures), Engine(torch.zeros(count))
    grown, without = engine.grow(last, roots), alone.grow(last, roots)
    assert torch.equal(grown[::2], without[::2])
    assert torch.equal(engine.trees.parents[:count:2], alone.trees.parents[:count:2])
    assert engine.trees.counts[:count].tolist() == [4, DEPTH] * 3
    assert engine.trees.parents[1, :DEPTH].tolist() == [-1, 0, 1]


def test_a_chain_is_worth_what_was_known_before_its_tokens_were_drawn() -> None:
    """The value of a token may not tell of it, since chains end by values."""
    count = 2000
    engine = Engine(torch.ones(count))
    tokens = engine.grow(torch.zeros(count).long(), torch.full((count,), FIRST))
    values = engine.trees.values[:count]
    assert len(set(tokens[:, 0].tolist())) == VOCABULARY
    assert len(values[:, 0].unique()) == 1
    for token in range(VOCABULARY):
        assert len(values[tokens[:, 0] == token, 1].unique()) == 1


@pytest.mark.parametrize("kept", [VOCABULARY, 2])
def test_stored_distributions_are_those_that_the_tokens_were_drawn_from(kept: int) -> None:
    count = 20_000
    engine = Engine(torch.full((count,), 0.5), kept=kept)
    tokens = engine.grow(torch.zeros(count).long(), torch.full((count,), FIRST))
    best = (DRAFT / 0.5).topk(kept, dim=1)
    wanted = best.values.softmax(dim=1)
    for place, last in enumerate((torch.zeros(count).long(), tokens[:, 0])):
        assert torch.equal(
            engine.draws.distributions.tokens[:count, place].long(), best.indices[last]
        )
        torch.testing.assert_close(engine.draws.distributions.chances[:count, place], wanted[last])
    seen = torch.bincount(tokens[:, 0], minlength=VOCABULARY)[best.indices[0]]
    assert int(seen.sum()) == count
    expected = wanted[0].double() / wanted[0].double().sum()
    assert chisquare(seen.double(), expected * count).pvalue > 1e-3


def verifier_of(engine: Engine, decide: DecideTrees) -> TreeVerifier:
    buffers: Any = SimpleNamespace(**vars(engine.buffers), device=torch.device("cpu"))
    nothing: Any = None
    samples = DrawnSamples(engine.trees, engine.draws, decide)
    return TreeVerifier(
        nothing,
        engine.trees,
        nothing,
        nothing,
        nothing,
        walk=SamplesWalk(samples, SampledWalk(engine.trees, walk)),
        buffers=buffers,
        keepers=nothing,
    )


def test_no_chain_compiles_a_kernel_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    traversal = pytest.importorskip(
        "dyntree_kernels.cuda.traversal", reason="Triton is not installed"
    )
    kernels = {name: Kernel() for name in ("_add_up", "_accept", "_draw", "_emit")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(traversal, name, kernel)
    engines = [Engine(torch.ones(count)) for count in range(1, 6)]
    verifier_of(engines[0], traversal.decide_trees).rehearse()
    rehearsed = {name: {*kernel.compiled} for name, kernel in kernels.items()}
    assert all(len(compiled) == 1 for compiled in rehearsed.values())
    for engine in engines:
        engine.samples = DrawnSamples(engine.trees, engine.draws, traversal.decide_trees)
        engine.step(torch.zeros(len(engine.seeds)).long(), torch.full_like(engine.seeds, FIRST))
    assert {name: kernel.compiled for name, kernel in kernels.items()} == rehearsed
