"""Growth in plain torch with tries: what it stores of each node is that of the node's path."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

import pytest
import torch
from growing import generator, paths_at, paths_of
from growth_steps import memory_of
from reference.growths import Path
from tries import Edges, as_trie

from dyntree_kernels.contracts import BESIDE, BOTH, DRAFT, KINDS, LOOK_UP, RequestParams
from dyntree_kernels.cpu.gumbel import gumbel_noise, perturbed_logits
from dyntree_plugin.engine.papers.tensor_growth import TensorGrowth
from dyntree_plugin.engine.step.rows import PAD_SLOT
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import ChildPicker
from dyntree_plugin.tree.growth import Frontier, GrowthConfig
from dyntree_plugin.tree.judged import JudgedTrie
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import TokenTree
from dyntree_plugin.tree.value import AcceptanceEstimate, features, logit_of, temperature_class

VOCAB, LAST = 12, 60
SHAPE = TreeShape(node_budget=30, max_depth=5, width=3, children=3)
TEMPERATURES = torch.tensor([0.0, 0.7, 1.0])
CLASSES = temperature_class(TEMPERATURES)
ROOTS, SEEDS = torch.tensor([10, 21, 32]), torch.tensor([3, -4, 5])
REQUESTS = len(ROOTS)
LEVELS = torch.full_like(ROOTS, 100)


def random_tries(seed: int) -> list[Edges]:
    """Return the evidence of about 12 nodes for each request, some below the deepest level."""
    choices, made = random.Random(seed), []
    for _ in range(REQUESTS):
        found: Edges = {}
        for _ in range(12):
            above = choices.choice([(), *found, *list(found)[-1:] * 8])
            found.setdefault((*above, choices.randrange(VOCAB)), choices.uniform(-2, 4))
        made.append(found)
    return made


class Step:
    """One step's growth. ``silent`` are paths at which the draft has no distribution."""

    def __init__(
        self,
        seed: int = 0,
        *,
        coupling: bool = True,
        calibrated: bool = True,
        silent: Collection[Path] = (),
        chained: tuple[bool, ...] = (False,) * REQUESTS,
    ) -> None:
        self.seed, self.silent, self.chained = seed, silent, chained
        shape = replace(SHAPE, coupling=coupling)
        self.plan = TreePlan(shape, GrowthConfig(), "match", calibration=calibrated)
        self.estimate = AcceptanceEstimate("cpu")
        own = torch.rand(self.estimate.weights.shape, generator=generator(seed, ()))
        self.estimate.weights += own
        pick = ChildPicker(self.plan, perturbed_logits, self.estimate)
        rows, columns = REQUESTS * SHAPE.width, REQUESTS * self.plan.scratch_slots
        self.memory = memory_of(REQUESTS, rows, columns, LAST)
        self.trees = TreeStore(REQUESTS, self.plan, VOCAB, torch.device("cpu"))
        self.growth = TensorGrowth(self.trees, pick, self.memory)
        self.tries = random_tries(seed)
        self.ran: list[list[Path]] = [[] for _ in ROOTS]

    def logits(self, row: int, path: Path) -> torch.Tensor:
        if path in self.silent:
            return torch.full((VOCAB,), float("nan"))
        return 2 * torch.randn(VOCAB, generator=generator(self.seed + row, path))

    def grow(self, forwards: int = SHAPE.max_depth) -> TokenTree:
        """Grow with so many draft forwards, the root's included, and store the trees."""
        chained = torch.tensor(self.chained)
        given = ROOTS, TEMPERATURES, CLASSES, SEEDS, chained, LEVELS, torch.arange(REQUESTS)
        self.memory.of_requests.fill(RequestParams(*given))
        self.growth.start(REQUESTS)
        trie = as_trie(self.tries)
        self.growth.graft(trie._replace(evidence=trie.evidence.float()))
        columns: list[list[Path]] = [[] for _ in ROOTS]
        if forwards:
            self.ran = [[()] for _ in ROOTS]
            self.growth.pick(torch.stack([self.logits(row, ()) for row in range(REQUESTS)]))
        for width in self.plan.growing.widths[: max(0, forwards - 1)]:
            paths = self.expand(width, columns)
            self.growth.pick(
                torch.stack([self.logits(row, p) for row in range(REQUESTS) for p in paths[row]])
            )
        slots = torch.arange(REQUESTS)
        tokens = self.growth.finish()
        stored = self.trees
        parts = (stored.parents, stored.depths, stored.values, stored.counts)
        return TokenTree(tokens, *(each[slots] for each in parts))

    def expand(self, width: int, columns: list[list[Path]]) -> list[list[Path]]:
        """Return the paths of the next forward's rows, as attention sees them."""
        words = -(-self.plan.scratch_slots // 32)
        bits, rows = torch.zeros(REQUESTS * width, words, dtype=torch.int32), REQUESTS * width
        self.growth.expand(bits)
        depths = self.memory.rows.positions[:rows].view(REQUESTS, width) - ROOTS[:, None]
        valid = (self.memory.rows.slots[0, :rows] != PAD_SLOT).view(REQUESTS, width)
        tokens = self.memory.rows.ids[:rows].view(REQUESTS, width)
        frontier = Frontier(tokens, depths, bits.view(REQUESTS, width, -1), valid, depths)
        paths = [paths_at(frontier, row, columns[row]) for row in range(REQUESTS)]
        for row, new in enumerate(paths):
            self.ran[row] += [path for path, real in zip(new, valid[row], strict=True) if real]
        return paths

    # What should be known of the node at a path.

    def log_probs(self, row: int, path: Path) -> torch.Tensor:
        """Return the draft's log probabilities below ``path``, with the target sampler's noise."""
        logits, heat, of_row = self.logits(row, path)[None], TEMPERATURES[row], slice(row, row + 1)
        if heat > 0 and self.plan.coupled:
            position = ROOTS[of_row] + len(path)
            logits = perturbed_logits(logits, TEMPERATURES[of_row], SEEDS[of_row], position)
        elif heat > 0:
            logits = logits / heat
        return logits[0].log_softmax(dim=0)

    def noise(self, row: int, path: Path) -> float:
        if not self.plan.coupled or TEMPERATURES[row] == 0:
            return 0.0
        of_row = slice(row, row + 1)
        drawn_at = ROOTS[of_row] + len(path) - 1
        return float(gumbel_noise(SEEDS[of_row], drawn_at, VOCAB)[0, path[-1]])

    def known(self, row: int, path: Path) -> tuple[int, list[float], float]:
        """Return kind, features, and the log chance of the edge without calibration."""
        above, token = path[:-1], path[-1]
        told = above in self.ran[row] and above not in self.silent
        edges = {} if self.chained[row] else self.tries[row]
        evidence = edges.get(path, float("nan"))
        if path in edges and not told:
            unjudged = float(torch.nn.functional.logsigmoid(torch.tensor(evidence)))
            return LOOK_UP, [evidence, self.noise(row, path)], unjudged
        assert told
        log_probs = self.log_probs(row, above)
        if path in edges:
            return BOTH, [float(logit_of(log_probs[token])), evidence], float(log_probs[token])
        best = log_probs.topk(SHAPE.children)
        child = best.indices.tolist().index(token)
        kind = BESIDE if any(other[:-1] == above for other in edges) else DRAFT
        return kind, features(best.values)[child].tolist(), float(best.values[child])

    def assert_stored(self, forwards: int = SHAPE.max_depth) -> set[int]:
        """Raise unless all that is stored of a node is that of its path; return the kinds."""
        tree, found = self.grow(forwards), set()
        tree.check()
        for row in range(REQUESTS):
            values, takes = {(): 0.0}, {(): -1}
            for node, path in enumerate(paths_of(tree, row)):
                kind, x, log_chance = self.known(row, path)
                if self.plan.calibrated:
                    torch.testing.assert_close(
                        self.trees.features[row, node], torch.tensor(x), atol=1e-4, rtol=1e-4
                    )
                    weights = self.estimate.weights[CLASSES[row] * KINDS + kind]
                    logit = weights @ torch.tensor([1.0, *x])
                    log_chance = float(torch.nn.functional.logsigmoid(logit))
                values[path] = values[path[:-1]] + log_chance
                takes[path] = 0 if kind in (LOOK_UP, BOTH) else takes[path[:-1]] + 1
                assert int(self.trees.kinds[row, node]) == kind
                assert int(self.trees.forwards[row, node]) == takes[path]
                assert float(tree.values[row, node]) == pytest.approx(values[path], abs=1e-3)
                found.add(kind)
        return found


@pytest.mark.parametrize(("coupling", "calibrated"), [(True, True), (False, False)])
def test_each_node_is_stored_with_what_is_known_of_it(coupling: bool, calibrated: bool) -> None:
    found: set[int] = set()
    for seed in range(5):
        found |= Step(seed, coupling=coupling, calibrated=calibrated).assert_stored()
    assert found == {DRAFT, LOOK_UP, BOTH, BESIDE}


@pytest.mark.parametrize("forwards", range(SHAPE.max_depth))
def test_growth_may_end_after_any_forward_and_before_the_first(forwards: int) -> None:
    found = Step(forwards).assert_stored(forwards)
    assert (found == {LOOK_UP}) == (forwards == 0)


def test_where_the_draft_has_no_distribution_the_trie_speaks_alone() -> None:
    step = Step(silent=[()])
    assert step.assert_stored() >= {LOOK_UP, BOTH}
    first = step.trees.depths[:REQUESTS] == 1
    real = torch.arange(SHAPE.node_budget) < step.trees.counts[:REQUESTS, None]
    assert (step.trees.kinds[:REQUESTS][first & real] == LOOK_UP).all()


def test_a_request_that_may_not_branch_takes_no_trie() -> None:
    step = Step(chained=(False, True, False))
    step.assert_stored()
    count = step.trees.counts[1]
    assert (step.trees.kinds[1, :count] == DRAFT).all()
    assert step.trees.parents[1, :count].tolist() == list(range(-1, int(count) - 1))


def test_data_of_another_candidate_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the trie's nodes are the first candidates."""
    right = JudgedTrie.candidate_kinds.fget
    assert right is not None
    turned = property(lambda self: right(self).roll(1, dims=1))
    monkeypatch.setattr(JudgedTrie, "candidate_kinds", turned)
    with pytest.raises(AssertionError):
        Step().assert_stored()
