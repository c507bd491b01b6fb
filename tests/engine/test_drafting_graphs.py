"""Drafting in graphs of single forwards grows the trees of eager drafting with as many forwards.

A graph is replaced by a call that runs again, as in `replays`. If kernels are interpreted, CUDA's
kernels draft in the graphs and are compared with tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_model import HIDDEN, LONGEST, MOST, VOCAB, Draft
from interpreted import pytest_interpreted
from replays import graph
from torch.utils._python_dispatch import _disable_current_modes

from vllm_cpu_runner import install

install()  # must run before the runner's modules are imported


from dyntree_kernels.contracts import (  # noqa: E402
    BOTH,
    DRAFT,
    LOOK_UP,
    GrowthSettings,
)
from dyntree_kernels.cpu.growth import CompiledGrowth  # noqa: E402
from dyntree_kernels.cpu.gumbel import perturbed_logits  # noqa: E402
from dyntree_plugin.engine.cpu.ops import CPUOps  # noqa: E402
from dyntree_plugin.engine.cuda.captured import CapturedDrafting, CapturedStages  # noqa: E402
from dyntree_plugin.engine.step import rows as row_memory  # noqa: E402
from dyntree_plugin.engine.step.draft import Drafter  # noqa: E402
from dyntree_plugin.engine.step.forwards import DraftModels  # noqa: E402
from dyntree_plugin.engine.step.look_up import TextLookUp  # noqa: E402
from dyntree_plugin.engine.step.records import Emitted  # noqa: E402
from dyntree_plugin.engine.step.requests import COLUMNS  # noqa: E402
from dyntree_plugin.engine.step.rows import RowMemory, TensorRows  # noqa: E402
from dyntree_plugin.engine.step.stages import DraftStages  # noqa: E402
from dyntree_plugin.engine.step.tensor_growth import TensorGrowth  # noqa: E402
from dyntree_plugin.engine.step.transfer import at_hand  # noqa: E402
from dyntree_plugin.engine.step.trees import TreeStore  # noqa: E402
from dyntree_plugin.options import DynTreeOptions  # noqa: E402
from dyntree_plugin.tree.budget.choice import node_buckets  # noqa: E402
from dyntree_plugin.tree.children import ChildPicker  # noqa: E402
from dyntree_plugin.tree.drafting import grow  # noqa: E402
from dyntree_plugin.tree.plan import TreePlan  # noqa: E402
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class  # noqa: E402

PLAN = DynTreeOptions(max_depth=4, width=2, children=3, budget="adaptive", lookup="off").resolve(7)
FORWARDS = len(PLAN.growing.widths)
OF_BOTH = DynTreeOptions(max_depth=6, max_forwards=4, width=2, children=3).resolve(7)
"""A plan with look-up beside the draft."""
OF_LOOK_UP = DynTreeOptions(max_depth=6).resolve(7, draft=False)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process interprets kernels; this is chosen when triton is imported."""
STORED = (
    *("parents", "depths", "values", "counts", "admitted", "grown", "ancestors", "features"),
    *("kinds", "forwards"),
)


class Drafting:
    """The stages of drafting with their own trees, captured or eager."""

    def __init__(
        self,
        ops: Any,
        growth_type: Any,
        *,
        captured: bool,
        writer: Any = None,
        plan: TreePlan = PLAN,
    ) -> None:
        """``growth_type`` None means growth on tensors."""
        self.plan = plan
        self.trees = TreeStore(MOST, plan, VOCAB, torch.device("cpu"))
        estimate = AcceptanceEstimate("cpu")
        estimate.weights += torch.linspace(0, 1, 3)
        chained = torch.arange(MOST + 1) == 3
        self.model: Any = Draft()
        widths, depth = plan.growing.widths, plan.shape.max_depth
        self.memory = RowMemory(self.model, max((*widths, depth + 1)), plan.growing.scratch_slots)
        self.writer = (writer or ops.row_writer)(self.memory)
        source = DraftModels(self.model, (), self.memory, self.writer)
        self.draft_model = source.models[0]
        self.texts = Texts()
        states: Any = self.texts
        tries = TextLookUp(states, ops.look_up, plan.shape.grafts, depth)
        growth = self.growth(growth_type, estimate)
        stages = DraftStages(
            source if plan.has_draft else None,
            tries if plan.shape.grafts else None,
            growth,
            self.memory.stored_at,
            widths,
            chained,
            ops.pays,
        )
        self.graphs = CapturedStages(lambda _: self.drafting, lambda: nullcontext(graph))
        self.drafter = Drafter(stages, ops, self.graphs, depth, self.trees.spare)
        if captured:
            numbers = sorted(
                {1 + min(size, depth) for size in node_buckets(plan.shape.node_budget)}
            )
            self.drafting = CapturedDrafting(stages, numbers, MOST, self.trees.spare)
            self.graphs.prepare(stages)
            with torch.inference_mode():
                self.graphs.capture()

    def growth(self, growth_type: Any, estimate: AcceptanceEstimate) -> Any:
        last, plan = self.memory.last_position, self.plan
        if growth_type is None:
            pick = ChildPicker(plan, perturbed_logits, estimate)
            return TensorGrowth(self.trees, pick, self.memory.buffers, last)
        return growth_type(
            GrowthSettings(
                requests=MOST,
                node_budget=plan.shape.node_budget,
                children=plan.growing.children,
                widths=plan.growing.widths,
                least=plan.growth.parameter or 0.0,
                longest=last,
                coupled=plan.coupled,
                weights=estimate.weights,
                rows=self.memory.buffers,
                trees=self.trees.arrays,
                grafts=plan.shape.grafts,
                max_depth=plan.shape.max_depth,
            )
        )

    def player(self, requests: torch.Tensor) -> Any:
        return self.graphs.drafting(requests) or self.drafter._eager(requests)


NO_STATES: Any = None  # a separate draft model reads tokens alone


class Texts:
    """Texts of few different tokens, in which a look-up finds something; as vLLM keeps them."""

    def __init__(self) -> None:
        self.max_num_reqs, self.device = MOST, torch.device("cpu")
        g = torch.Generator().manual_seed(1)
        texts = torch.randint(3, (MOST, LONGEST), generator=g, dtype=torch.int32)
        self.all_token_ids = SimpleNamespace(gpu=texts)
        self.total_len = SimpleNamespace(gpu=torch.zeros(MOST, dtype=torch.int32))


Make = Callable[..., list[Drafting]]


@pytest.fixture
def draftings(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that makes an eager and a captured drafting."""
    monkeypatch.setattr(row_memory, "build_attn_metadata", lambda **metadata: metadata)
    monkeypatch.setattr(row_memory, "build_slot_mappings_by_layer", lambda slots, _: slots)

    def make(growth: Any = CompiledGrowth, plan: TreePlan = PLAN) -> list[Drafting]:
        return [
            Drafting(CPUOps(), growth, captured=captured, plan=plan) for captured in (False, True)
        ]

    return make


def packed(slots: list[int]) -> torch.Tensor:
    """Return a packed batch of the requests in these slots."""
    found = torch.zeros(len(slots), COLUMNS, dtype=torch.int64)
    found[:, 0] = index = torch.tensor(slots)
    temperature = index % 3 / 2
    found[:, 5] = temperature.view(torch.int32)
    found[:, 6] = index + 7
    found[:, 7] = temperature_class(temperature)
    return found


BATCHES = [[2, 0, 5], [1], [7, 6, 5, 4, 3, 2, 1, 0], [3, 4]]


def step(drafting: Drafting, number: int, forwards: int) -> list[torch.Tensor]:
    """Return the tokens of a step's trees, and all stored trees."""
    slots = BATCHES[number % len(BATCHES)]
    g = torch.Generator().manual_seed(number)
    requests, most = len(slots), (1, 2, 5)[number % 3]
    roots = torch.randint(10, LONGEST - 9, (requests,), generator=g)
    roots[0] = LONGEST - 4  # little room is left after it
    counts = torch.randint(1, most + 1, (requests,), generator=g).int()
    tokens = torch.randint(VOCAB, (requests, drafting.plan.shape.max_depth + 1), generator=g)
    drafting.texts.total_len.gpu[slots] = (roots + counts + 1).int().clamp(max=LONGEST)
    player = drafting.player(packed(slots))
    if not drafting.plan.has_draft:
        pass  # Nothing catches up.
    elif number % 4 == 3:  # as after a batch with prompts
        hidden = torch.randn(requests, HIDDEN, generator=g)
        drafting.draft_model.root_hidden[:requests] = hidden
        drafting.memory.root_positions[:requests] = roots
    else:
        player.catch_up(Emitted(roots, tokens, counts, most), NO_STATES)
    drafts, ran = grow(player, forwards)
    assert ran == forwards or drafting.graphs.fewest_forwards == 0
    trees = [getattr(drafting.trees, name)[:MOST] for name in STORED]
    return [each.clone() for each in (drafts, *trees)]


def differing(made: list[Drafting], steps: int = 24) -> list[tuple[int, int]]:
    """Return the steps, and their numbers of forwards, whose trees differ."""
    every = 1 + len(made[0].plan.growing.widths)
    numbers = [(at, (at * 5 + at // 4) % every) for at in range(steps)]
    assert steps < 12 or {f for _, f in numbers} == {*range(every)}
    found = []
    with torch.inference_mode():
        for number, forwards in numbers:
            ours, theirs = (step(each, number, forwards) for each in made)
            if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
                found.append((number, forwards))
    return found


@pytest.mark.parametrize("plan", [PLAN, OF_BOTH, OF_LOOK_UP])
def test_any_number_of_forwards_grows_the_trees_of_eager_drafting(
    draftings: Make, plan: TreePlan
) -> None:
    made = draftings(plan=plan)
    assert differing(made) == []
    tree = made[0].trees
    chains = torch.arange(MOST) == 3
    assert tree.counts[:MOST][~chains].min() > 0
    assert tree.depths.max() >= (plan.shape.forwards or 4)
    real = torch.arange(plan.shape.node_budget) < tree.counts[:MOST, None]
    kinds = {DRAFT} if plan is PLAN else {DRAFT, LOOK_UP, BOTH} if plan is OF_BOTH else {LOOK_UP}
    assert {*tree.kinds[:MOST][real].tolist()} >= kinds


def test_a_look_up_in_texts_that_are_captured_with_is_seen(draftings: Make) -> None:
    """Control: tries of the texts as they were at capture are not those of the step."""
    made = draftings(plan=OF_LOOK_UP)
    made[1].texts.all_token_ids.gpu = made[1].texts.all_token_ids.gpu.flip(1).contiguous()
    assert differing(made) != []


@pytest.fixture
def by_kernels(draftings: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that makes two draftings that grow by kernels. One does the rest on
    tensors, the other by kernels."""
    if not INTERPRETED:
        pytest.skip("runs in a process with TRITON_INTERPRET=1")
    from triton.runtime.interpreter import InterpretedFunction

    from dyntree_kernels.cuda.growth import DeviceGrowth
    from dyntree_plugin.engine.cuda.ops import CUDAOps

    stock: Any = InterpretedFunction.run

    def run(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():  # It aliases the arguments' memory.
            stock(*args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    ops = CUDAOps(at_hand)

    def make(plan: TreePlan = PLAN) -> list[Drafting]:
        return [
            Drafting(ops, DeviceGrowth, captured=False, writer=TensorRows, plan=plan),
            Drafting(ops, DeviceGrowth, captured=True, plan=plan),
        ]

    return make


@pytest.mark.parametrize("plan", [PLAN, OF_BOTH, OF_LOOK_UP])
def test_interpreted_kernels_grow_the_trees_of_tensors(by_kernels: Make, plan: TreePlan) -> None:
    made = by_kernels(plan=plan)
    assert differing(made, steps=12 if plan is PLAN else 5) == []
    trees, chains = made[0].trees, torch.arange(MOST) == 3
    assert trees.counts[:MOST][~chains].min() > 0
    real = torch.arange(plan.shape.node_budget) < trees.counts[:MOST, None]
    kinds = {*trees.kinds[:MOST][real].tolist()}
    assert kinds >= ({DRAFT} if plan is PLAN else {BOTH} if plan is OF_BOTH else {LOOK_UP})


def test_interpreted_tries_of_other_texts_are_seen(by_kernels: Make) -> None:
    """Control of the test above."""
    made = by_kernels(plan=OF_LOOK_UP)
    made[1].texts.all_token_ids.gpu.copy_(made[1].texts.all_token_ids.gpu.flip(1))
    assert differing(made, steps=3) != []


@pytest.mark.parametrize("name", ["chain", "begin"])
def test_interpreted_kernels_whose_slots_are_off_are_seen(
    name: str, by_kernels: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = by_kernels()
    writer: Any = made[1].writer
    stock = getattr(writer, name)
    tables = writer._tables

    def elsewhere(*args: Any) -> Any:
        writer._tables = tables._replace(sizes=tables.sizes + 1)
        found = stock(*args)
        writer._tables = tables
        return found

    monkeypatch.setattr(writer, name, elsewhere)
    assert differing(made, steps=3) != []


@pytest.mark.skipif(INTERPRETED, reason="this process runs the kernels itself")
def test_the_kernels_do_what_the_tensors_do() -> None:
    pytest.importorskip("triton", reason="these kernels are written in Triton")
    done = pytest_interpreted(__file__, "-k", "interpreted")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "6 passed" in done.stdout, done.stdout


def test_trees_of_other_numbers_of_forwards_differ(
    draftings: Make,
) -> None:
    """Control: another number of forwards gives other trees."""
    eager = draftings()[0]
    with torch.inference_mode():
        trees = [step(eager, 2, forwards) for forwards in range(1 + FORWARDS)]
    for fewer, more in pairwise(trees):
        assert not all(torch.equal(a, b) for a, b in zip(fewer, more, strict=True))


class Keeping(CompiledGrowth):
    """Keep the inputs without a copy, in the memory of the call that gave them."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._kept: dict[int, Any] = {}

    def start(self, *given: torch.Tensor) -> None:
        self._kept[len(given[0])] = tuple(each.numpy() for each in given)
        super().start(*given)

    def resume(self, requests: int, forwards: int) -> None:
        self._request_buffers = self._kept[requests]
        super().resume(requests, forwards)


def test_what_does_not_outlive_its_graph_is_seen(draftings: Make) -> None:
    assert differing(draftings(Keeping)) != []


def test_a_graph_of_another_number_of_forwards_is_seen(
    draftings: Make,
) -> None:
    made = draftings()
    made[1].drafting.finish = [made[1].drafting.finish[-1]] * (1 + FORWARDS)
    found = differing(made)
    assert {forwards for _, forwards in found} >= {*range(FORWARDS)}


def test_growth_that_is_not_compiled_is_one_graph_of_every_forward(
    draftings: Make,
) -> None:
    eager, of_graphs = draftings(None)
    fewest = (eager.graphs.fewest_forwards, of_graphs.graphs.fewest_forwards)
    assert fewest == (0, FORWARDS)
    with torch.inference_mode():
        for number in range(8):
            ours, theirs = (step(each, number, FORWARDS) for each in (eager, of_graphs))
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_without_a_tree_the_draft_reads_on_all_the_same(
    draftings: Make,
) -> None:
    ran: list[list[int]] = []
    for drafting in draftings():
        stock = drafting.model._run_model
        rows: list[int] = []

        def watched(ids: torch.Tensor, *more: Any, _stock: Any = stock, _rows: Any = rows) -> Any:
            _rows.extend(ids.tolist())
            return _stock(ids, *more)

        drafting.model._run_model = watched
        emitted = Emitted(torch.tensor([9, 30]), torch.tensor([[4], [6]]), torch.ones(2).int(), 1)
        with torch.inference_mode():
            drafting.player(packed([1, 5])).catch_up(emitted, NO_STATES)
        ran.append(rows)
    assert ran == [[4, 6], [4, 6]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, so that sums have the same order for any number of rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
