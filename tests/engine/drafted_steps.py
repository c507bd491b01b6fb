"""Steps of drafting over a small draft of any kind, with their own trees, captured or eager.

A graph is replaced by a call that runs again, as in `replays`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_model import HIDDEN, LONGEST, MOST, VOCAB, Block, Draft, Head
from growth_steps import STORED, growth_of
from replays import graph

from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_plugin.engine.cpu.ops import CPUOps
from dyntree_plugin.engine.cuda.captured import CapturedDrafting, CapturedStages
from dyntree_plugin.engine.drafts.block import BlockDraft, StateBlocks
from dyntree_plugin.engine.drafts.draft_model import DraftModels
from dyntree_plugin.engine.drafts.head import HeadStates, TargetHead
from dyntree_plugin.engine.drafts.look_up import TextLookUp
from dyntree_plugin.engine.drafts.masked import MaskedText
from dyntree_plugin.engine.step import rows as row_memory
from dyntree_plugin.engine.step.catch_up import CatchUp
from dyntree_plugin.engine.step.draft import Drafter
from dyntree_plugin.engine.step.growth_stages import DraftStages, Eager
from dyntree_plugin.engine.step.records import Emitted, TargetStates
from dyntree_plugin.engine.step.requests import COLUMNS
from dyntree_plugin.engine.step.rows import RowMemory
from dyntree_plugin.engine.step.source import NodeSource
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.budget.choice import node_buckets
from dyntree_plugin.tree.drafting import grow
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class


class Drafting:
    """The stages of drafting with their own trees, captured or eager."""

    def __init__(
        self,
        ops: Any,
        growth_type: Any,
        *,
        captured: bool,
        plan: TreePlan,
        numbers: Sequence[int] = (),
        ranking: Any = None,
        models: Sequence[Draft] = (),
    ) -> None:
        """``growth_type`` of a plan that is compiled. ``numbers``: columns of the catch-up's
        graphs, by default those of an adaptive budget. ``ranking``: as for a `Drafter`.
        ``models``: a draft model, and those beside it; by default there is one."""
        self.plan = plan
        self.trees = TreeStore(MOST, plan, VOCAB, torch.device("cpu"))
        estimate = AcceptanceEstimate("cpu")
        estimate.weights += torch.linspace(0, 1, 3)
        chained = torch.arange(MOST + 1) == 3
        shape, widths = plan.shape, plan.growing.widths
        depth = shape.max_depth
        buckets = node_buckets(shape.node_budget, fill_tiles=True)
        self.numbers = numbers or sorted({1 + min(size, depth) for size in buckets})
        first, *self.further = models or [
            (Block if shape.block else Head if shape.head else Draft)()
        ]
        self.model: Any = first
        shift = getattr(self.model, "shift", -1 if shape.block else shape.shift)
        self.memory = RowMemory(self.model, plan.most_rows, plan.scratch_slots, shift)
        self.writer = ops.row_writer(self.memory)
        self.source = source = self._source()
        self.texts = Texts()
        states: Any = self.texts
        tries = TextLookUp(states, ops.look_up, plan.shape.grafts, depth)
        growth = growth_of(growth_type, self.trees, self.memory.of_growth, estimate)
        drafts = plan.has_draft
        stages = DraftStages(
            growth,
            self.memory.of_requests,
            source=source if drafts else None,
            writer=self.writer if drafts else None,
            tries=tries if plan.shape.grafts else None,
            widths=widths,
            max_depth=max(1, sum(widths)),
            chained=chained,
            pays=ops.pays,
            block=shape.block,
        )
        # The target's graphs serve half of the batches.
        rows = MOST // 2 * (1 + shape.node_budget) if shape.head or shape.block else 0
        self.hidden = tuple(torch.zeros(rows, HIDDEN) for _ in range(2 * bool(rows)))
        self.graphs = CapturedStages(
            lambda _: self.drafting, lambda: nullcontext(graph), lambda: self.hidden
        )
        self.drafter = Drafter(
            stages, ops, self.graphs, max_depth=depth, spare=self.trees.spare, ranking=ranking
        )
        if captured:
            of_trees = self.trees.spare, VOCAB
            self.drafting = CapturedDrafting(
                stages, self.numbers, MOST, *of_trees, nodes=shape.node_budget
            )
            self.graphs.prepare(stages)
            with torch.inference_mode():
                self.graphs.capture()

    def _source(self) -> NodeSource:
        if length := self.plan.shape.block:
            given = torch.zeros(1 + MOST * (self.plan.shape.max_depth + 1), HIDDEN)
            if hasattr(self.model, "run_masked"):
                self.roots = (torch.zeros(MOST, length, HIDDEN),)
                text = MaskedText(
                    self.model.run_masked,
                    partial(self.model.compute_draft_logits, _=0),
                    *(self.model, self.memory, self.writer),
                    mask=VOCAB - 1,
                    hidden=self.roots[0],
                    of_head=(self.model.combine_masked, given) if self.model.shift else None,
                )
                return BlockDraft(text, self.memory, length)
            reader = StateBlocks(
                self.model, self.model, self.memory, self.writer, length=length, given=given
            )
            self.roots = (reader.root_ids,)
            return BlockDraft(reader, self.memory, length)
        if not self.plan.shape.head:
            apart = self.plan.growing.roots > 1
            models = DraftModels(
                self.model, self.further, self.memory, self.writer, VOCAB, trees_apart=apart
            )
            self.roots = (models.models[0].root_hidden,)
            return models
        rows, expansions = self.plan.shape.max_depth + 1, 1 + self.memory.scratch
        self.states = HeadStates(
            MOST, rows, expansions, HIDDEN, HIDDEN, torch.float32, self.memory.device
        )
        self.roots = (self.states.root, self.states.own[:, 0])
        return TargetHead(self.model, self.states, self.memory, self.writer)

    def read_prompts(self, roots: torch.Tensor, g: torch.Generator) -> None:
        """Do as a batch with prompts does, whose rows are read without a graph."""
        for each in self.roots:
            read = 9 * torch.randn(len(roots), *each.shape[1:], generator=g)
            each[: len(roots)] = read if each.is_floating_point() else read.abs()
        self.memory.root_positions[: len(roots)] = roots

    def player(self, requests: torch.Tensor) -> Any:
        return self.drafter._player(requests)


NO_BATCH: Any = None  # only prompts are read from it
NO_STATES: Any = None  # a separate draft model reads tokens alone


def target_states(drafting: Drafting, counts: torch.Tensor, g: torch.Generator) -> TargetStates:
    """Return the target's states of a batch whose requests got ``counts`` [R] tokens."""
    requests, shape = len(counts), drafting.plan.shape
    first = torch.arange(requests) * (1 + shape.node_budget)
    hidden = [
        torch.randn(requests * (1 + shape.node_budget), HIDDEN, generator=g) for _ in range(2)
    ]
    path = torch.randint(shape.node_budget, (requests, shape.max_depth), generator=g)
    path[torch.arange(shape.max_depth) >= counts[:, None] - 1] = -1
    drafted = None if counts.max() == 1 else path  # as in a batch without drafts
    return TargetStates((hidden[0], hidden[1]), first, drafted, torch.zeros(0))


class Texts:
    """Texts of few different tokens, in which a look-up finds something; as vLLM keeps them."""

    def __init__(self) -> None:
        self.max_num_reqs, self.device = MOST, torch.device("cpu")
        g = torch.Generator().manual_seed(1)
        texts = torch.randint(3, (MOST, LONGEST), generator=g, dtype=torch.int32)
        self.all_token_ids = SimpleNamespace(gpu=texts)
        self.total_len = SimpleNamespace(gpu=torch.zeros(MOST, dtype=torch.int32))


def packed(slots: list[int]) -> torch.Tensor:
    """Return a packed batch of the requests in these slots."""
    found = torch.zeros(len(slots), COLUMNS, dtype=torch.int64)
    found[:, 0] = index = torch.tensor(slots)
    temperature = index % 3 / 2
    found[:, 5] = temperature.view(torch.int32)
    found[:, 6] = index + 7
    found[:, 7] = temperature_class(temperature)
    found[:, 8] = LONGEST
    return found


BATCHES = [[2, 0, 5], [1], [7, 6, 5, 4, 3, 2, 1, 0], [3, 4]]


def step(drafting: Drafting, number: int, forwards: int) -> list[torch.Tensor]:
    """Return the tokens of a step's trees, and all stored trees."""
    slots = BATCHES[number % len(BATCHES)]
    g = torch.Generator().manual_seed(number)
    requests, most = len(slots), min((1, 2, 5)[number % 3], drafting.numbers[-1])
    roots = torch.randint(10, LONGEST - 9, (requests,), generator=g)
    if requests > 1:
        roots[0] = LONGEST - 4  # little room is left after it
    counts = torch.randint(1, most + 1, (requests,), generator=g).int()
    tokens = torch.randint(VOCAB, (requests, drafting.plan.shape.max_depth + 1), generator=g)
    drafting.texts.total_len.gpu[slots] = (roots + counts + 1).int().clamp(max=LONGEST)
    player = drafting.player(packed(slots))
    if not drafting.plan.has_draft:
        pass  # Nothing catches up.
    elif number % 4 == 3:
        drafting.read_prompts(roots, g)
    else:
        states = target_states(drafting, counts, g)
        if isinstance(player, Eager):  # the output of the model depends on the columns
            most = next(number for number in drafting.numbers if number >= most)
        emitted = Emitted(roots, tokens, counts, most)
        player.catch_up(CatchUp(NO_BATCH, emitted, states, drafting.plan.shape.max_depth))
    drafts, ran = grow(player, forwards)
    assert ran == forwards or drafting.graphs.fewest_forwards == 0
    trees = [getattr(drafting.trees, name)[:MOST] for name in STORED]
    return [each.clone() for each in (drafts, *trees)]


def differing(made: list[Drafting], steps: int = 24) -> list[tuple[int, int]]:
    """Return the steps, and their numbers of forwards, whose trees differ."""
    every = 1 + made[0].plan.further_forwards
    numbers = [(at, (at * 5 + at // 4) % every) for at in range(steps)]
    assert steps < 12 or {f for _, f in numbers} == {*range(every)}
    found = []
    with torch.inference_mode():
        for number, forwards in numbers:
            ours, theirs = (step(each, number, forwards) for each in made)
            if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
                found.append((number, forwards))
    return found


Make = Callable[..., list[Drafting]]


def makes(monkeypatch: pytest.MonkeyPatch, usual: TreePlan) -> Make:
    """Return a function that makes an eager and a captured drafting."""
    without_vllm(monkeypatch)

    def make(
        growth: Any = CompiledGrowth,
        plan: TreePlan = usual,
        numbers: Sequence[int] = (),
        rankings: Sequence[Any] = (None, None),
        model: Any = None,
    ) -> list[Drafting]:
        return [
            Drafting(
                CPUOps(),
                growth,
                captured=captured,
                plan=plan,
                numbers=numbers,
                ranking=ranking,
                models=[model()] if model else (),
            )
            for captured, ranking in zip((False, True), rankings, strict=True)
        ]

    return make


def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_memory, "build_attn_metadata", lambda **metadata: metadata)
    monkeypatch.setattr(row_memory, "build_slot_mappings_by_layer", lambda slots, _: slots)
