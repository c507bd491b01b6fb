"""Drafting in graphs of single forwards grows the trees of eager drafting that ends as early.

A graph is played by a call that is run again, and whose own memory is ruined when it ends, as the
next graph of its pool may write over it. Where kernels are interpreted, those of CUDA draft in the
graphs, and the tensors beside them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import pytest_interpreted
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from vllm.config.compilation import CUDAGraphMode

from vllm_cpu_runner import install

install()  # the runner's modules need it before they are imported

from dyntree_kernels.cpu.growth import CompiledGrowth  # noqa: E402
from dyntree_kernels.cpu.gumbel import perturbed_logits  # noqa: E402
from dyntree_plugin.engine.cpu.speculator import CPUTreeSpeculator  # noqa: E402
from dyntree_plugin.engine.cuda import speculator as graphed  # noqa: E402
from dyntree_plugin.engine.cuda.graphs import Call, Replay, Tensors  # noqa: E402
from dyntree_plugin.engine.cuda.speculator import GraphedTreeSpeculator  # noqa: E402
from dyntree_plugin.engine.step import forwards as draft_forwards  # noqa: E402
from dyntree_plugin.engine.step.compiled_growth import CompiledTreeSpeculator  # noqa: E402
from dyntree_plugin.engine.step.forwards import Emitted, Roots  # noqa: E402
from dyntree_plugin.engine.step.requests import COLUMNS  # noqa: E402
from dyntree_plugin.engine.step.trees import TreeStore  # noqa: E402
from dyntree_plugin.options import DynTreeOptions  # noqa: E402
from dyntree_plugin.tree.children import ChildPicker  # noqa: E402
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class  # noqa: E402

MOST, LONGEST, VOCAB, HIDDEN = 8, 64, 40, 16
PLAN = DynTreeOptions(max_depth=4, width=2, children=3, budget="adaptive").resolve(7)
FORWARDS = len(PLAN.growing.widths)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Chosen when triton is imported, so of a whole process."""
STORED = ("parents", "depths", "values", "counts", "admitted", "grown", "ancestors", "features")


class OwnMemory(TorchDispatchMode):
    """Knows the memory that is allocated while it is entered."""

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


class BlockTables:
    """One group, in which every request has a block of its own of 100 slots."""

    num_kv_cache_groups = 1
    input_block_tables: tuple[torch.Tensor, ...] = ()

    def __init__(self) -> None:
        self._blocks = torch.arange(MOST, dtype=torch.int32)
        self.block_table_ptrs = torch.tensor([self._blocks.data_ptr()], dtype=torch.uint64)
        self.block_table_strides = torch.tensor([1])
        self.block_sizes_tensor = torch.tensor([100], dtype=torch.int32)
        self.slot_mapping_enabled = torch.tensor([True])

    def compute_slot_mappings(
        self, index: torch.Tensor, _: Any, positions: torch.Tensor, rows: int, out: torch.Tensor
    ) -> torch.Tensor:
        assert index.is_contiguous(), "vLLM's kernel takes no stride"
        of_row = index.repeat_interleave(rows // len(index))
        out[:, :rows] = torch.where(of_row < 0, -1, 100 * of_row + positions)
        return out[:, :rows]


class Draft:
    """A draft model that reads everything that a forward is given. Stands before a speculator."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.vllm_config, self.device = vllm_config, device
        self.max_num_reqs, self.max_num_tokens, self.max_model_len = MOST, 64, LONGEST
        self.hidden_size, self.dtype, self.vocab_size = HIDDEN, torch.float32, VOCAB
        self.arange_np = np.arange(MOST + 1, dtype=np.int32)
        self.arange_gpu = torch.from_numpy(self.arange_np)
        self.draft_is_prefilling = torch.zeros(MOST, dtype=torch.bool)
        self.block_tables, self.attn_groups, self.kv_cache_config = BlockTables(), None, None
        g = torch.Generator().manual_seed(0)
        self.head = 2 * torch.randn(HIDDEN, VOCAB, generator=g)
        self.mix = torch.randn(6, HIDDEN, generator=g)

    def set_attn(self) -> None: ...

    def _run_model(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: Any, slots: Any, _: Any
    ) -> torch.Tensor:
        mask = metadata["model_specific_attn_metadata"]._mask
        width = metadata["max_query_len"]
        starts = metadata["query_start_loc_gpu"]
        assert starts.tolist() == [width * r for r in range(len(starts))]
        of_request = (mask.ctx_lens, metadata["seq_lens"])
        columns = (
            ids, positions, mask.ancestor_bits.sum(dim=1), slots[0],
            *(each.repeat_interleave(width) for each in of_request),
        )  # fmt: skip
        return product([each[:, None].float() for each in columns], self.mix)

    def compute_draft_logits(self, hidden: torch.Tensor, _: int) -> torch.Tensor:
        return product([*(hidden - hidden.floor()).split(1, dim=1)], self.head)


def product(columns: list[torch.Tensor], matrix: torch.Tensor) -> torch.Tensor:
    """Of ``columns`` [rows, 1] with a matrix: a row's sums are the same in any batch."""
    total = torch.zeros(len(columns[0]), matrix.shape[1])
    for column, row in zip(columns, matrix, strict=True):
        total += column * row
    return total


@pytest.fixture
def speculators(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """An eager one and one of graphs, with trees of their own."""
    stock = draft_forwards.StandaloneARSpeculator
    monkeypatch.setattr(stock, "__init__", Draft.__init__)
    monkeypatch.setattr(stock, "set_attn", Draft.set_attn)
    for name in ("_run_model", "compute_draft_logits"):
        monkeypatch.setattr(stock, name, getattr(Draft, name), raising=False)
    monkeypatch.setattr(draft_forwards, "build_attn_metadata", lambda **metadata: metadata)
    monkeypatch.setattr(draft_forwards, "build_slot_mappings_by_layer", lambda slots, _: slots)
    monkeypatch.setattr(graphed, "trees_are_cut", lambda _: True)

    def make(
        growth: type[Any] = CompiledGrowth, most: float = np.inf, kinds: Any = ON_THE_CPU
    ) -> list[Any]:
        made = []
        for kind in kinds:
            trees = TreeStore(MOST, PLAN, VOCAB, torch.device("cpu"))
            estimate = AcceptanceEstimate("cpu")
            estimate.weights += torch.linspace(0, 1, 3)
            chained = torch.arange(MOST + 1) == 3
            own = type("Own", (kind,), {"growth_type": growth, "most_candidates": most})
            clock: Any = lambda stage: nullcontext()  # noqa: E731
            pick = ChildPicker(PLAN, perturbed_logits, estimate)
            config: Any = SimpleNamespace()
            speculator: Any = own(
                config, torch.device("cpu"), trees, chained, pick, lambda _: None, clock
            )
            speculator.set_attn()
            made.append(speculator)
        with torch.inference_mode():
            made[1].init_cudagraph_manager(CUDAGraphMode.FULL)
            made[1].capture_drafting(graph)
        return made

    return make


class GraphedCPUTreeSpeculator(GraphedTreeSpeculator, CPUTreeSpeculator):
    pass


ON_THE_CPU = CPUTreeSpeculator, GraphedCPUTreeSpeculator


def packed(slots: list[int]) -> torch.Tensor:
    """Requests in these slots."""
    found = torch.zeros(len(slots), COLUMNS, dtype=torch.int64)
    found[:, 0] = index = torch.tensor(slots)
    temperature = index % 3 / 2
    found[:, 5] = temperature.view(torch.int32)
    found[:, 6] = index + 7
    found[:, 7] = temperature_class(temperature)
    return found


BATCHES = [[2, 0, 5], [1], [7, 6, 5, 4, 3, 2, 1, 0], [3, 4]]


def step(speculator: Any, number: int, forwards: int) -> list[torch.Tensor]:
    """The tokens of a step's trees, and all trees."""
    slots = BATCHES[number % len(BATCHES)]
    g = torch.Generator().manual_seed(number)
    requests, most = len(slots), (1, 2, 5)[number % 3]
    roots = torch.randint(10, LONGEST - 9, (requests,), generator=g)
    roots[0] = LONGEST - 4  # little room behind
    counts = torch.randint(1, most + 1, (requests,), generator=g).int()
    tokens = torch.randint(VOCAB, (requests, PLAN.shape.max_depth + 1), generator=g)
    speculator.most_forwards, speculator.forwards = forwards, 1
    if number % 4 == 3:
        hidden = torch.randn(requests, HIDDEN, generator=g)
        drafts = speculator._grow_behind(packed(slots), Roots(hidden, roots), greedy=False)
    else:
        emitted = Emitted(roots, tokens, counts, most)
        drafts = speculator._draft(packed(slots), emitted, greedy=False)
    if isinstance(speculator, GraphedTreeSpeculator):
        assert speculator.forwards == 1 + forwards
    trees = [getattr(speculator.trees, name)[:MOST] for name in STORED]
    return [each.clone() for each in (drafts, *trees)]


def differing(speculators: list[Any], steps: int = 24) -> list[tuple[int, int]]:
    """Steps, and their numbers of forwards, whose trees differ."""
    numbers = [(at, (at * 5 + at // 4) % (1 + FORWARDS)) for at in range(steps)]
    assert steps < 12 or {f for _, f in numbers} == {*range(1 + FORWARDS)}
    found = []
    with torch.inference_mode():
        for number, forwards in numbers:
            ours, theirs = (step(each, number, forwards) for each in speculators)
            if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
                found.append((number, forwards))
    return found


def test_any_number_of_forwards_grows_the_trees_of_eager_drafting(
    speculators: Callable[..., list[Any]],
) -> None:
    made = speculators()
    assert differing(made) == []
    tree = made[0].trees
    assert tree.counts[:MOST].min() > 0
    assert tree.depths.max() == PLAN.shape.max_depth


@pytest.fixture
def by_kernels(speculators: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Growth by kernels, and what surrounds the forwards by tensors and by kernels."""
    if not INTERPRETED:
        pytest.skip("runs in a process with TRITON_INTERPRET=1")
    from triton.runtime.interpreter import InterpretedFunction

    from dyntree_kernels.cuda.growth import DeviceGrowth
    from dyntree_plugin.engine.cuda.draft_rows import GPUTreeSpeculator

    stock: Any = InterpretedFunction.run

    def run(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():  # It makes tensors of its own in the arguments' memory.
            stock(*args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return speculators(DeviceGrowth, kinds=(CompiledTreeSpeculator, GPUTreeSpeculator))


def test_interpreted_kernels_grow_the_trees_of_tensors(by_kernels: list[Any]) -> None:
    assert differing(by_kernels, steps=12) == []
    assert by_kernels[0].trees.counts[:MOST].min() > 0


@pytest.mark.parametrize("name", ["_chain", "_begin"])
def test_interpreted_kernels_whose_slots_are_off_are_seen(
    name: str, by_kernels: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = by_kernels
    stock = getattr(made[1], name)
    tables = made[1]._tables

    def elsewhere(*args: Any) -> Any:
        made[1]._tables = tables._replace(sizes=tables.sizes + 1)
        found = stock(*args)
        made[1]._tables = tables
        return found

    monkeypatch.setattr(made[1], name, elsewhere)
    assert differing(made, steps=3) != []


@pytest.mark.skipif(INTERPRETED, reason="this process runs them")
def test_the_kernels_do_what_the_tensors_do() -> None:
    pytest.importorskip("triton", reason="these kernels are written in Triton")
    done = pytest_interpreted(__file__, "-k", "interpreted")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "3 passed" in done.stdout, done.stdout


def test_trees_of_other_numbers_of_forwards_differ(
    speculators: Callable[..., list[Any]],
) -> None:
    """The control of what the steps compare."""
    eager = speculators()[0]
    with torch.inference_mode():
        trees = [step(eager, 2, forwards) for forwards in range(1 + FORWARDS)]
    for fewer, more in pairwise(trees):
        assert not all(torch.equal(a, b) for a, b in zip(fewer, more, strict=True))


class Keeping(CompiledGrowth):
    """Keeps what it is given where it lies, which is in the memory of the call that gives it."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._kept: dict[int, Any] = {}

    def start(self, *given: torch.Tensor) -> None:
        self._kept[len(given[0])] = tuple(each.numpy() for each in given)
        super().start(*given)

    def resume(self, requests: int, forwards: int) -> None:
        self._room = self._kept[requests]
        super().resume(requests, forwards)


def test_what_does_not_outlive_its_graph_is_seen(speculators: Callable[..., list[Any]]) -> None:
    assert differing(speculators(Keeping)) != []


def test_a_graph_of_another_number_of_forwards_is_seen(
    speculators: Callable[..., list[Any]],
) -> None:
    made = speculators()
    made[1]._finishing = [made[1]._finishing[-1]] * (1 + FORWARDS)
    found = differing(made)
    assert {forwards for _, forwards in found} >= {*range(FORWARDS)}


def test_growth_that_is_not_compiled_is_one_graph_of_every_forward(
    speculators: Callable[..., list[Any]],
) -> None:
    eager, of_graphs = speculators(most=1)
    assert (eager.fewest_forwards, of_graphs.fewest_forwards) == (0, FORWARDS)
    with torch.inference_mode():
        for number in range(8):
            ours, theirs = (step(each, number, FORWARDS) for each in (eager, of_graphs))
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_without_a_tree_the_draft_reads_on_all_the_same(
    speculators: Callable[..., list[Any]],
) -> None:
    ran: list[list[int]] = []
    for speculator in speculators():
        stock = speculator._run_model
        rows: list[int] = []

        def watched(ids: torch.Tensor, *more: Any, _stock: Any = stock, _rows: Any = rows) -> Any:
            _rows.extend(ids.tolist())
            return _stock(ids, *more)

        speculator._run_model = watched
        emitted = Emitted(torch.tensor([9, 30]), torch.tensor([[4], [6]]), torch.ones(2).int(), 1)
        with torch.inference_mode():
            speculator._follow(packed([1, 5]), emitted)
        ran.append(rows)
    assert ran == [[4, 6], [4, 6]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are added in the same order, however many rows there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
