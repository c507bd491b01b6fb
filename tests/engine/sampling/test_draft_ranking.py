"""Growth ranks what the target can draw: the requests' parameters on a draft's logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranked_steps import (
    ROOT,
    SLOTS,
    TEMPERATURES,
    VOCAB,
    Path,
    Step,
    logits_after,
    packed,
    path_of,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.states import SamplingStates

from dyntree_kernels.cpu.gumbel import perturbed_logits
from dyntree_kernels.paths import Paths
from dyntree_kernels.tries import Trie
from dyntree_plugin.engine.sampling import ranking as ranking_module
from dyntree_plugin.engine.sampling.parameters import ParameterRows
from dyntree_plugin.engine.sampling.ranking import TargetRanking
from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.plan import TreePlan

PLAN = DynTreeOptions(max_depth=4, width=3, children=3, lookup="off").resolve(12)
UNCALIBRATED = DynTreeOptions(
    max_depth=4, width=3, children=4, lookup="off", calibration="off"
).resolve(14)
OF_HEAD = DynTreeOptions(max_depth=4, width=3, children=3, lookup="off").resolve(12, head=True)
MERGED = DynTreeOptions(
    growth="expansion", expansion=[2, 2, 1], sampling="best", drafts=["another"]
).resolve(20)

OF_BOTH = DynTreeOptions(max_depth=4, max_forwards=2, width=3, children=3).resolve(12)

TOP_K = (2, 3, VOCAB, 4)
"""By slot."""


class Parameters:
    """Parameters in the place of the sampler's, with effects that depend on paths.

    Each request has a token that it never gets, and one that it gets at odd positions only. What is
    on the path loses 1.5, and after two tokens in a row the lower one is excluded.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[int, Path]] = []

    def needed(self, slots: Any) -> bool:
        return bool((slots >= 0).any())

    def apply(self, logits: torch.Tensor, rows: ParameterRows) -> torch.Tensor:
        assert logits.dtype == torch.float32
        assert rows.requests_np.tolist() == rows.requests.tolist()
        for row, (slot, position) in enumerate(
            zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)
        ):
            path = path_of(rows.paths, row)  # type: ignore[arg-type]
            self.seen.append((slot, path))
            assert position == ROOT + slot + len(path)
            logits[row] = processed(slot, path, logits[row])
        return logits


GUESSED: Path = (4, 7, 4)


class Guesses:
    """A look-up that finds the same path for every request, and is sure of it."""

    def trie(self, slots: torch.Tensor) -> Trie:
        found = Trie.room(len(slots), OF_BOTH.shape.grafts, slots.device)
        for node, token in enumerate(GUESSED):
            found.tokens[:, node], found.above[:, node] = token, node - 1
            found.evidence[:, node], found.exists[:, node] = 8.0, True
        return found

    def roots(self, slots: torch.Tensor) -> torch.Tensor:
        return ROOT + slots


def processed(slot: int, path: Path, logits: torch.Tensor) -> torch.Tensor:
    """Return what `Parameters` make of the logits below ``path``."""
    found = logits.clone()
    found[slot] = -torch.inf
    if (ROOT + slot + len(path)) % 2 == 0:
        found[slot + 1] = -torch.inf
    for token in path:
        found[token] -= 1.5
    if len(path) > 1:
        found[min(path[-2:])] = -torch.inf
    return found


def law(slot: int, path: Path) -> torch.Tensor:
    """Return the scores of the target's candidates below ``path``, without what it cannot draw."""
    found = processed(slot, path, logits_after(slot, path))
    if TEMPERATURES[slot] > 0:
        found[found < found.topk(TOP_K[slot]).values[-1]] = -torch.inf
    of_row = (torch.tensor([TEMPERATURES[slot]]), torch.tensor([11 * slot + 5]))
    return perturbed_logits(found[None], *of_row, torch.tensor([ROOT + slot + len(path)]))[0]


def states() -> SamplingStates:
    """Return the sampler's states, in which every slot has its own top-k."""
    found = SamplingStates(len(SLOTS) + 1, VOCAB)
    for slot, (temperature, top_k) in enumerate(zip(TEMPERATURES, TOP_K, strict=True)):
        of_slot = SamplingParams(temperature=temperature, top_k=0 if top_k == VOCAB else top_k)
        found.add_request(slot, of_slot)
    found.apply_staged_writes()
    return found


def ranking(parameters: Any, of: SamplingStates) -> TargetRanking:
    total_len = ROOT + 1 + torch.arange(len(SLOTS) + 1, dtype=torch.int32)
    return TargetRanking(parameters, of, total_len, VOCAB, rows=3)


def ranked(plan: TreePlan) -> Step:
    rank = ranking(Parameters(), states()).of(packed())
    assert rank is not None
    return Step(plan, rank)


def unlike_the_law(step: Step) -> list[tuple[int, Path]]:
    """Return the nodes whose children are not the best of the law, in its order."""
    found = []
    for slot in SLOTS:
        for path, tokens in step.children(slot).items():
            scores = law(slot, path)
            best = scores.argsort(descending=True, stable=True)[: len(tokens)].tolist()
            if tokens != best or not scores[best].isfinite().all():
                found.append((slot, path))
    return found


@pytest.mark.parametrize("plan", [PLAN, UNCALIBRATED, OF_HEAD], ids=["", "uncalibrated", "head"])
def test_the_candidates_of_a_node_are_the_best_of_the_law(plan: TreePlan) -> None:
    """Control: without the parameters they are not."""
    step = ranked(plan)
    assert unlike_the_law(step) == []
    assert max(len(path) for slot in SLOTS for path in step.paths(slot)) == 4
    assert min(step.trees.counts[list(SLOTS)]) >= 6
    assert len(unlike_the_law(Step(plan, None))) > 6


@pytest.mark.parametrize(("fit", "ranks"), [(0, True), (-1, False)])
def test_batches_whose_logits_take_too_much_memory_are_not_ranked(
    fit: int, ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three copies of the logits of a forward are held at once."""
    copies = 3 * 4 * 3 * VOCAB * len(packed())
    monkeypatch.setattr(ranking_module, "MAX_CHUNK_BYTES", copies + fit)
    found = ranking(Parameters(), states()).of(packed())
    assert (found is not None) == ranks


def test_paths_are_those_of_the_expanded_nodes() -> None:
    parameters = Parameters()
    step = Step(PLAN, ranking(parameters, states()).of(packed()))
    for slot, ran in zip(SLOTS, step.source.ran, strict=True):
        assert {path for own, path in parameters.seen if own == slot} == ran
        assert max(map(len, ran)) == 3


def test_paths_hold_nodes_that_one_forward_expands_with_their_parents() -> None:
    parameters = Parameters()
    rank = ranking(parameters, states()).of(packed())
    step = Step(OF_BOTH, rank, tries=Guesses())
    for slot, ran in zip(SLOTS, step.source.ran, strict=True):
        assert {path for own, path in parameters.seen if own == slot} == ran
        assert GUESSED[:2] in ran
    assert len(OF_BOTH.growing.widths) == 1


def test_trees_of_several_drafts_have_the_best_of_the_law() -> None:
    step = ranked(MERGED)
    assert unlike_the_law(step) == []
    assert unlike_the_law(Step(MERGED, None)) != []


def test_requests_without_parameters_cost_nothing() -> None:
    class Unused:
        def needed(self, slots: Any) -> bool:
            return False

    whole = SamplingStates(len(SLOTS) + 1, VOCAB)
    for slot, temperature in enumerate(TEMPERATURES):
        of_slot = SamplingParams(temperature=temperature, top_k=3 if temperature == 0 else 0)
        whole.add_request(slot, of_slot)
    assert ranking(Unused(), whole).of(packed()) is None
    of_some: list[dict[str, Any]] = [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}]
    for params in of_some:
        whole.add_request(1, SamplingParams(**params))
        assert ranking(Unused(), whole).of(packed()) is not None


@pytest.mark.parametrize("columns", [VOCAB - 2, VOCAB + 3])
def test_logits_of_a_padded_vocabulary_become_the_targets(columns: int) -> None:
    rank = ranking(Parameters(), states()).of(packed())
    assert rank is not None
    logits = torch.zeros(len(SLOTS), columns, dtype=torch.bfloat16)
    paths = Paths(torch.zeros(4, 1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
    found = rank(logits, torch.tensor(SLOTS), paths)
    assert found.shape == (len(SLOTS), VOCAB)
    assert found.dtype == torch.float32
    assert (found[:, columns:] == -torch.inf).all()
    assert not logits.any()
