"""Drafting in graphs of single forwards grows the trees of eager drafting with as many forwards.

A graph is replaced by a call that runs again. Its own memory is overwritten when it ends, because
the next graph of the pool may do so. If kernels are interpreted, CUDA's kernels draft in the graphs
and are compared with tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from draft_model import HIDDEN, LONGEST, MOST, VOCAB, Draft
from interpreted import pytest_interpreted
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from vllm_cpu_runner import install

install()  # must run before the runner's modules are imported


from dyntree_kernels.contracts import GrowthSettings  # noqa: E402
from dyntree_kernels.cpu.growth import CompiledGrowth  # noqa: E402
from dyntree_kernels.cpu.gumbel import perturbed_logits  # noqa: E402
from dyntree_plugin.engine.cpu.ops import CPUOps  # noqa: E402
from dyntree_plugin.engine.cuda.captured import CapturedDrafting, CapturedStages  # noqa: E402
from dyntree_plugin.engine.cuda.graphs import Call, Replay, Tensors  # noqa: E402
from dyntree_plugin.engine.step import rows as row_memory  # noqa: E402
from dyntree_plugin.engine.step.draft import Drafter, DraftStages  # noqa: E402
from dyntree_plugin.engine.step.forwards import DraftModel  # noqa: E402
from dyntree_plugin.engine.step.records import Emitted  # noqa: E402
from dyntree_plugin.engine.step.requests import COLUMNS  # noqa: E402
from dyntree_plugin.engine.step.rows import RowMemory, TensorRows  # noqa: E402
from dyntree_plugin.engine.step.tensor_growth import TensorGrowth  # noqa: E402
from dyntree_plugin.engine.step.transfer import at_hand  # noqa: E402
from dyntree_plugin.engine.step.trees import TreeStore  # noqa: E402
from dyntree_plugin.options import DynTreeOptions  # noqa: E402
from dyntree_plugin.tree.budget.choice import node_buckets  # noqa: E402
from dyntree_plugin.tree.children import ChildPicker  # noqa: E402
from dyntree_plugin.tree.drafting import grow  # noqa: E402
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class  # noqa: E402

PLAN = DynTreeOptions(max_depth=4, width=2, children=3, budget="adaptive").resolve(7)
FORWARDS = len(PLAN.growing.widths)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process interprets kernels; this is chosen when triton is imported."""
STORED = ("parents", "depths", "values", "counts", "admitted", "grown", "ancestors", "features")


class OwnMemory(TorchDispatchMode):
    """Record the memory that is allocated while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self._found += [each for each in made if address(each) not in given]
        return result

    def ruin(self, kept: Tensors) -> None:
        spared = {address(each) for each in kept}
        for each in self._found:
            if address(each) not in spared:
                each.untyped_storage().fill_(0x55)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def graph(run: Call) -> tuple[Replay, Tensors]:
    def once() -> Tensors:
        with OwnMemory() as memory:
            values = run()
        memory.ruin(values)
        return values

    values = once()

    def replay() -> None:
        for value, new in zip(values, once(), strict=True):
            value.copy_(new)

    return replay, values


class Drafting:
    """The stages of drafting with their own trees, captured or eager."""

    def __init__(self, ops: Any, growth_type: Any, *, captured: bool, writer: Any = None) -> None:
        """``growth_type`` None means growth on tensors."""
        self.trees = TreeStore(MOST, PLAN, VOCAB, torch.device("cpu"))
        estimate = AcceptanceEstimate("cpu")
        estimate.weights += torch.linspace(0, 1, 3)
        chained = torch.arange(MOST + 1) == 3
        self.model: Any = Draft()
        widths, depth = PLAN.growing.widths, PLAN.shape.max_depth
        self.memory = RowMemory(self.model, max(*widths, depth + 1), PLAN.growing.scratch_slots)
        self.writer = (writer or ops.row_writer)(self.memory)
        source = DraftModel(self.model, self.memory, self.writer)
        growth = self.growth(growth_type, estimate)
        stages = DraftStages(source, None, growth, self.memory, widths, chained, ops.pays)
        self.graphs = CapturedStages()
        self.drafter = Drafter(stages, ops, self.graphs, depth, self.trees.spare)
        if captured:
            numbers = sorted(
                {1 + min(size, depth) for size in node_buckets(PLAN.shape.node_budget)}
            )
            self.drafting = CapturedDrafting(stages, numbers, MOST, self.trees.spare)
            self.graphs.prepare_drafting(self.drafting)
            with torch.inference_mode():
                self.graphs.capture_drafting(graph)

    def growth(self, growth_type: Any, estimate: AcceptanceEstimate) -> Any:
        last = self.memory.last_position
        if growth_type is None:
            pick = ChildPicker(PLAN, perturbed_logits, estimate)
            return TensorGrowth(self.trees, pick, self.memory.buffers, last)
        return growth_type(
            GrowthSettings(
                requests=MOST,
                node_budget=PLAN.shape.node_budget,
                children=PLAN.growing.children,
                widths=PLAN.growing.widths,
                least=PLAN.growth.parameter or 0.0,
                longest=last,
                coupled=PLAN.coupled,
                weights=estimate.weights,
                rows=self.memory.buffers,
                trees=self.trees.arrays,
            )
        )

    def player(self, requests: torch.Tensor) -> Any:
        return self.graphs.drafting(requests) or self.drafter._eager(requests)


Make = Callable[..., list[Drafting]]


@pytest.fixture
def draftings(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that makes an eager and a captured drafting."""
    monkeypatch.setattr(row_memory, "build_attn_metadata", lambda **metadata: metadata)
    monkeypatch.setattr(row_memory, "build_slot_mappings_by_layer", lambda slots, _: slots)

    def make(growth: Any = CompiledGrowth) -> list[Drafting]:
        return [Drafting(CPUOps(), growth, captured=captured) for captured in (False, True)]

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
    tokens = torch.randint(VOCAB, (requests, PLAN.shape.max_depth + 1), generator=g)
    player = drafting.player(packed(slots))
    if number % 4 == 3:  # as after a batch with prompts
        drafting.memory.root_hidden[:requests] = torch.randn(requests, HIDDEN, generator=g)
        drafting.memory.root_positions[:requests] = roots
    else:
        player.catch_up(Emitted(roots, tokens, counts, most))
    drafts, ran = grow(player, forwards)
    assert ran == forwards or drafting.graphs.fewest_forwards == 0
    trees = [getattr(drafting.trees, name)[:MOST] for name in STORED]
    return [each.clone() for each in (drafts, *trees)]


def differing(made: list[Drafting], steps: int = 24) -> list[tuple[int, int]]:
    """Return the steps, and their numbers of forwards, whose trees differ."""
    numbers = [(at, (at * 5 + at // 4) % (1 + FORWARDS)) for at in range(steps)]
    assert steps < 12 or {f for _, f in numbers} == {*range(1 + FORWARDS)}
    found = []
    with torch.inference_mode():
        for number, forwards in numbers:
            ours, theirs = (step(each, number, forwards) for each in made)
            if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
                found.append((number, forwards))
    return found


def test_any_number_of_forwards_grows_the_trees_of_eager_drafting(
    draftings: Make,
) -> None:
    made = draftings()
    assert differing(made) == []
    tree = made[0].trees
    assert tree.counts[:MOST].min() > 0
    assert tree.depths.max() == PLAN.shape.max_depth


@pytest.fixture
def by_kernels(draftings: Make, monkeypatch: pytest.MonkeyPatch) -> list[Drafting]:
    """Two draftings that grow by kernels. One does the rest on tensors, the other by kernels."""
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
    return [
        Drafting(ops, DeviceGrowth, captured=False, writer=TensorRows),
        Drafting(ops, DeviceGrowth, captured=True),
    ]


def test_interpreted_kernels_grow_the_trees_of_tensors(by_kernels: list[Drafting]) -> None:
    assert differing(by_kernels, steps=12) == []
    assert by_kernels[0].trees.counts[:MOST].min() > 0


@pytest.mark.parametrize("name", ["chain", "begin"])
def test_interpreted_kernels_whose_slots_are_off_are_seen(
    name: str, by_kernels: list[Drafting], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer: Any = by_kernels[1].writer
    stock = getattr(writer, name)
    tables = writer._tables

    def elsewhere(*args: Any) -> Any:
        writer._tables = tables._replace(sizes=tables.sizes + 1)
        found = stock(*args)
        writer._tables = tables
        return found

    monkeypatch.setattr(writer, name, elsewhere)
    assert differing(by_kernels, steps=3) != []


@pytest.mark.skipif(INTERPRETED, reason="this process runs the kernels itself")
def test_the_kernels_do_what_the_tensors_do() -> None:
    pytest.importorskip("triton", reason="these kernels are written in Triton")
    done = pytest_interpreted(__file__, "-k", "interpreted")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "3 passed" in done.stdout, done.stdout


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
            drafting.player(packed([1, 5])).catch_up(emitted)
        ran.append(rows)
    assert ran == [[4, 6], [4, 6]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, so that sums have the same order for any number of rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
