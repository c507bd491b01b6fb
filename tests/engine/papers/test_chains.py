"""Drawn chains through the engine's growth and walk: the law of whole texts, over many steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

from vllm_cpu_runner import install

install()  # the runner's modules need it before they are imported

from reference.blocks_in_torch import Chains, Chances, decide  # noqa: E402

from dyntree_kernels.blocks import DecideBlocks  # noqa: E402
from dyntree_kernels.contracts import (  # noqa: E402
    BatchRows,
    OfRequests,
    StepGrowth,
    Walked,
    room_for,
)
from dyntree_kernels.cpu.drawn import decide_trees  # noqa: E402
from dyntree_kernels.cpu.growth import CompiledGrowth  # noqa: E402
from dyntree_kernels.cpu.gumbel import perturbed_logits  # noqa: E402
from dyntree_kernels.cpu.walk import walk  # noqa: E402
from dyntree_kernels.drawn import DrawnTrees  # noqa: E402
from dyntree_plugin.engine.papers.chain_growth import ChainGrowth  # noqa: E402
from dyntree_plugin.engine.papers.chain_samples import ChainSamples, SamplesWalk, TreeSamples  # noqa: E402
from dyntree_plugin.engine.papers.draw_store import DrawStore  # noqa: E402
from dyntree_plugin.engine.step.requests import COLUMNS, Requests  # noqa: E402
from dyntree_plugin.engine.step.sampled_walk import SampledWalk  # noqa: E402
from dyntree_plugin.engine.step.trees import TreeStore  # noqa: E402
from dyntree_plugin.engine.step.verify import TreeVerifier  # noqa: E402
from dyntree_plugin.tree.budget.chains import Limits, level_counts  # noqa: E402
from dyntree_plugin.tree.growth import GrowthConfig  # noqa: E402
from dyntree_plugin.tree.plan import TreePlan  # noqa: E402
from dyntree_plugin.tree.shape import TreeShape  # noqa: E402
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class  # noqa: E402

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
SURELY_BIASED, UNSUSPICIOUS = 1e-6, 0.01


def logits(seed: int) -> torch.Tensor:
    """Return the logits that a model has after each token, [V, V]."""
    return 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))


DRAFT, TARGET = logits(1), logits(2)


@dataclass
class Engine:
    """R requests, one step after another, with tables in place of models.

    ``compiled``: the growth. ``ends``: whether chains end early, at limits. ``peeks``: whether
    they end by the tokens that they leave out. Chains are verified as on a CPU, or `as_blocks`.
    """

    temperatures: torch.Tensor
    compiled: bool = True
    ends: bool = False
    peeks: bool = False
    plan: TreePlan = PLAN
    cut: ClassVar[Any] = staticmethod(level_counts)

    def __post_init__(self) -> None:
        count = len(self.temperatures)
        self.seeds = torch.arange(count) * 7919 + 3
        self.estimate = AcceptanceEstimate("cpu")
        self.trees = TreeStore(count, self.plan, VOCABULARY, torch.device("cpu"))
        rows, columns = count * self.plan.shape.width, count * self.plan.scratch_slots
        self.memory = memory_of(count, rows, columns, last=500)
        self.draw(count)
        nodes = self.plan.shape.node_budget
        self.buffers = SimpleNamespace(
            input_ids=torch.zeros(count * (nodes + 1), dtype=torch.int32),
            positions=torch.zeros(count * (nodes + 1), dtype=torch.int64),
            seq_lens=torch.full((count,), 1000, dtype=torch.int32),
        )

    def draw(self, count: int) -> None:
        """Make what draws for ``count`` requests, and what verifies that."""
        self.draws = DrawStore(count, self.plan, VOCABULARY, torch.device("cpu"))
        kind = CompiledGrowth if self.compiled else None
        growth = growth_of(kind, self.trees, self.memory, self.estimate)
        self.growth: StepGrowth = ChainGrowth(growth, self.draws, perturbed_logits, self.memory)
        self.samples = TreeSamples(self.trees, self.draws, decide_trees)

    def grow(self, last: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
        """Return the tokens of the trees below the tokens ``last`` at positions ``roots``."""
        count, width = len(last), self.plan.shape.width
        classes = temperature_class(self.temperatures)
        free = torch.zeros(count, dtype=torch.bool)
        far = torch.full_like(roots, 500)
        slots = torch.arange(count)
        self.memory.of_requests.fill(
            OfRequests(roots, self.temperatures, classes, self.seeds, free, far, slots)
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
            pairs = [self.cut(pair, Limits(0.2, 5)) for pair in chances.reshape(-1, 2, nodes)]
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

    def walk(self, requests: Requests, sampled: torch.Tensor, processed: torch.Tensor) -> Walked:
        buffers, shape = self.buffers, self.plan.shape
        arrays = (sampled, buffers.input_ids, buffers.positions, buffers.seq_lens, None)
        rows = self.samples(requests, BatchRows(requests.packed, *arrays), processed)
        sizes = (shape.node_budget, shape.max_depth, sampled.device)
        walked = room_for(len(requests.packed), *sizes, ranked=True)
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


def as_blocks(engine: Engine) -> Engine:
    """Verify its chains by the rule of CUDA's kernels."""
    decided = partial(decide, perturb=perturbed_logits)
    engine.samples = ChainSamples(engine.trees, engine.draws, decided)
    return engine


def on_a_cpu(engine: Engine) -> Engine:
    return engine


@pytest.mark.parametrize("verified", [on_a_cpu, as_blocks])
@pytest.mark.parametrize(("compiled", "ends"), [(True, True), (False, False)])
def test_texts_follow_the_target_over_many_steps(
    compiled: bool, ends: bool, verified: Callable[[Engine], Engine]
) -> None:
    engine = verified(Engine(torch.ones(RUNS), compiled, ends))
    assert p_value(engine.texts()) > UNSUSPICIOUS


def test_both_ways_accept_as_much_of_chains() -> None:
    def mean_length(engine: Engine) -> float:
        roots = torch.full((RUNS,), FIRST)
        return float(engine.step(torch.zeros(RUNS).long(), roots)[1].double().mean())

    ways = [mean_length(way(Engine(torch.ones(RUNS)))) for way in (on_a_cpu, as_blocks)]
    assert abs(ways[0] - ways[1]) < 4 * DEPTH / RUNS**0.5


def test_ends_that_depend_on_the_tokens_that_they_leave_out_are_noticed() -> None:
    assert p_value(Engine(torch.ones(RUNS), peeks=True).texts()) < SURELY_BIASED


def test_a_chain_that_goes_on_from_the_target_instead_of_the_residual_is_noticed() -> None:
    def next_law(self: Chains, found: Chances, lengths: torch.Tensor) -> torch.Tensor:
        return self.target[torch.arange(len(lengths)), lengths]

    with mock.patch.object(Chains, "next_law", next_law):
        assert p_value(as_blocks(Engine(torch.ones(RUNS))).texts()) < SURELY_BIASED


def test_a_chain_that_is_verified_by_another_law_than_that_of_its_draws_is_noticed() -> None:
    def even(rows: BatchRows, logits: torch.Tensor, trees: DrawnTrees) -> None:
        decide_trees(rows, logits, trees._replace(laws=torch.full_like(trees.laws, 1 / 3)))

    engine = Engine(torch.ones(RUNS))
    with mock.patch.object(engine.samples, "_decide", even):
        assert p_value(engine.texts()) < SURELY_BIASED


def noise_keys(engine: Engine) -> list[tuple[int, int]]:
    """Return the seed and the position of all noise that the texts of an engine took."""
    keys: list[tuple[int, int]] = []

    def noted(
        scores: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        keys.extend(zip(seeds.tolist(), at.tolist(), strict=True))
        return perturbed_logits(scores, temperatures, seeds, at)

    with (
        mock.patch.object(engine.growth, "_perturb", noted),
        mock.patch.object(engine.samples, "_decide", partial(decide, perturb=noted)),
    ):
        engine.texts()
    return keys


def test_no_step_uses_the_noise_of_another_one() -> None:
    """What a step rejects tells of its noise, so the next one needs noise of its own."""
    keys = noise_keys(as_blocks(Engine(torch.ones(40))))
    assert len(keys) > 40 * 2 * (DEPTH + 2)
    assert len(set(keys)) == len(keys)


def test_noise_that_two_steps_share_is_noticed() -> None:
    engine = as_blocks(Engine(torch.ones(40)))
    step = engine.step

    def same_roots(last: torch.Tensor, roots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return step(last, torch.full_like(roots, FIRST))

    with mock.patch.object(engine, "step", same_roots):
        keys = noise_keys(engine)
    assert len(set(keys)) < len(keys)


def test_greedy_requests_beside_chains_get_the_targets_best_tokens() -> None:
    temperatures = torch.tensor([0.0, 1.0] * 50)
    texts = Engine(temperatures).texts()[::2]
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


def test_stored_distributions_are_those_that_the_tokens_were_drawn_from() -> None:
    count = 20_000
    engine = Engine(torch.full((count,), 0.5))
    tokens = engine.grow(torch.zeros(count).long(), torch.full((count,), FIRST))
    laws = engine.draws.laws[:count]
    wanted = (DRAFT / 0.5).softmax(dim=1)
    torch.testing.assert_close(laws[:, 0], wanted[:1].expand(count, -1))
    torch.testing.assert_close(laws[:, 1], wanted[tokens[:, 0]])
    seen = torch.bincount(tokens[:, 0], minlength=VOCABULARY).double()
    assert chisquare(seen, wanted[0].double() * count / wanted[0].double().sum()).pvalue > 1e-3


def verifier_of(engine: Engine, decide: DecideBlocks) -> TreeVerifier:
    ops: Any = SimpleNamespace(walk=walk, perturb=perturbed_logits, decide_blocks=decide)
    buffers: Any = SimpleNamespace(**vars(engine.buffers), device=torch.device("cpu"))
    nothing: Any = None
    walk_of_chains = SamplesWalk(
        ChainSamples(engine.trees, engine.draws, decide), SampledWalk(engine.trees, walk)
    )
    return TreeVerifier(
        nothing,
        engine.trees,
        nothing,
        ops,
        nothing,
        walk=walk_of_chains,
        buffers=buffers,
        keepers=nothing,
    )


def test_no_chain_compiles_a_kernel_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = pytest.importorskip("dyntree_kernels.cuda.blocks", reason="Triton is not installed")
    kernels = {
        name: Kernel() for name in ("_add_up", "_compare", "_weigh", "_accept", "_draw", "_emit")
    }
    for name, kernel in kernels.items():
        monkeypatch.setattr(blocks, name, kernel)
    engines = [Engine(torch.ones(count)) for count in range(1, 6)]
    verifier_of(engines[0], blocks.decide).rehearse()
    rehearsed = {name: {*kernel.compiled} for name, kernel in kernels.items()}
    assert all(len(compiled) == 1 for compiled in rehearsed.values())
    for engine in engines:
        engine.samples = ChainSamples(engine.trees, engine.draws, blocks.decide)
        engine.step(torch.zeros(len(engine.seeds)).long(), torch.full_like(engine.seeds, FIRST))
    assert {name: kernel.compiled for name, kernel in kernels.items()} == rehearsed
