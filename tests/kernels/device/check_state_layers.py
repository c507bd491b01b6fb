"""Recurrent layers of the engine on CUDA do what those of a CPU do, over several steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from paged_cases import DEVICE

if DEVICE.type == "cuda":
    pytest.skip("its tensors are on a CPU", allow_module_level=True)
pytest.importorskip("numba")
pytest.importorskip("vllm.v1.worker.cpu.shm", exc_type=ImportError)  # patches torch.cuda

from launches import Launches
from state_layers import HEADS, PREFIX, SIZE, delta_net, mamba2
from torch.utils._python_dispatch import _disable_current_modes
from tree_shapes import random_tree
from triton.runtime.interpreter import InterpretedFunction
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MambaSpec

from dyntree_kernels.ancestors import ancestor_bits
from dyntree_plugin.engine.attention.metadata import TreeMask
from dyntree_plugin.engine.configuration import mark_as_tree
from dyntree_plugin.engine.layer_kinds import AcceptedPaths
from dyntree_plugin.engine.states import cuda_layers, layers, rows
from dyntree_plugin.engine.states.builders import WithDraftsOnCPU
from dyntree_plugin.engine.states.committer import committer
from dyntree_plugin.options.options import DynTreeOptions

NODES, REQUESTS = 6, 3
COLUMNS = NODES + 1
END_SLOT = 3
PATHS = [[0, 2], [], [1]]
"""The accepted nodes of each request; below, every tree begins with two children of the root."""


class Stock:
    def __init__(self, *_: Any) -> None:
        pass

    def build(self, *_: Any) -> Any:
        raise RuntimeError("all requests have drafts")


class OnCPU(WithDraftsOnCPU, Stock):
    pass


class OnCUDA(cuda_layers.WithDraftsOnCUDA, Stock):
    pass


class Device(NamedTuple):
    layer: Any
    builder: Any


def device(layer: Any, builder: type) -> Device:
    speculation: Any = SimpleNamespace(method="draft_model", num_speculative_tokens=NODES)
    mark_as_tree(speculation, DynTreeOptions().resolve(NODES))
    config = SimpleNamespace(
        speculative_config=speculation,
        scheduler_config=SimpleNamespace(max_num_seqs=REQUESTS),
        cache_config=SimpleNamespace(mamba_cache_mode="align"),
        compilation_config=SimpleNamespace(static_forward_context={PREFIX: layer}),
    )
    # The path of the first request ends in the next block.
    spec = MambaSpec(block_size=22, shapes=(), dtypes=(), mamba_cache_mode="align")
    return Device(layer, builder(spec, [PREFIX], config, torch.device("cpu")))


def batch() -> CommonAttentionMetadata:
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32) * COLUMNS
    lengths = torch.full((REQUESTS,), 20 + COLUMNS, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=REQUESTS,
        num_actual_tokens=REQUESTS * COLUMNS, max_query_len=COLUMNS, max_seq_len=64,
        block_table_tensor=torch.tensor([[END_SLOT, 4], [2, 1], [5, 7]], dtype=torch.int32),
        slot_mapping=torch.zeros(REQUESTS * COLUMNS), seq_lens_cpu_upper_bound=lengths,
    )  # fmt: skip


def mask(seed: int) -> TreeMask:
    drawn = torch.Generator().manual_seed(seed)
    trees = [[-1, 0, 0, *random_tree(COLUMNS, drawn)[3:]] for _ in range(REQUESTS)]
    for tree, third in zip(trees, (1, 2, 2), strict=True):
        tree[3] = third
    bits = ancestor_bits(torch.tensor(trees)).flatten(0, 1)
    return TreeMask(torch.tensor([20, 20, -1]).int(), bits, has_plain=True, drafted=REQUESTS)


@contextmanager
def forward_of(metadata: Any) -> Iterator[None]:
    context = SimpleNamespace(attn_metadata={PREFIX: metadata})
    with mock.patch.object(rows, "get_forward_context", return_value=context):
        yield


def step(of: Device, seed: int, run: Any) -> torch.Tensor:
    """Run a step's forward and commit; return the outputs."""
    found = forward(of, seed, run)
    commit(of, of.builder.kept)
    return found


def forward(of: Device, seed: int, run: Any) -> torch.Tensor:
    metadata = of.builder.build(0, batch(), tree_mask=mask(seed))
    with forward_of(metadata):
        found: torch.Tensor = run(of.layer, torch.Generator().manual_seed(seed))
    return found


def commit(of: Device, places: torch.Tensor) -> None:
    path = torch.tensor([each + [-1] * (3 - len(each)) for each in PATHS])
    path[2] = -1  # the chain is a prompt's last token, filled up with drafts
    roots = torch.arange(REQUESTS) * COLUMNS
    committer([of.layer], REQUESTS)(AcceptedPaths(path, roots, torch.arange(REQUESTS)), places)


def through_mamba2(layer: Any, drawn: torch.Generator) -> torch.Tensor:
    width = layer.tped_intermediate_size + layer.tped_conv_size + layer.tped_dt_size
    out = torch.zeros(REQUESTS * COLUMNS, HEADS * SIZE)
    layer.conv_ssm_forward(torch.randn(len(out), width, generator=drawn), out)
    return out


def through_delta_net(layer: Any, drawn: torch.Generator) -> torch.Tensor:
    out = torch.zeros(REQUESTS * COLUMNS, HEADS, SIZE)
    raw = torch.randn(len(out), layer.conv_dim, generator=drawn)
    b, a = torch.randn(2, len(out), HEADS, generator=drawn)
    layer._forward_core(raw, b, a, out)
    return out


KINDS = pytest.mark.parametrize(
    ("name", "make", "run"),
    [
        ("TreeMambaMixer2", mamba2, through_mamba2),
        ("TreeGatedDeltaNet", delta_net, through_delta_net),
    ],
)


def made(name: str, make: Any, pending: int = 1) -> tuple[Device, Device]:
    found = []
    for module, builder in ((layers, OnCPU), (cuda_layers, OnCUDA)):
        torch.manual_seed(0)
        layer = make(getattr(module, name), REQUESTS * COLUMNS, COLUMNS, pending)
        if name == "TreeGatedDeltaNet" and module is cuda_layers:  # other order in memory
            history, states = layer.kv_cache
            layer.kv_cache = history, states.transpose(2, 3).contiguous()
        found.append(device(layer, builder))
    return found[0], found[1]


@KINDS
def test_steps_give_the_outputs_and_the_states_of_a_cpu(name: str, make: Any, run: Any) -> None:
    cpu, cuda = made(name, make)
    cuda.layer.warm_up()
    unused = cuda.layer.kv_cache[0][END_SLOT].clone()
    for seed in range(3):
        outputs = [step(each, seed, run) for each in (cpu, cuda)]
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    assert_equal_states(name, cpu, cuda)
    assert not torch.equal(cuda.layer.kv_cache[0][END_SLOT], unused)


def assert_equal_states(name: str, cpu: Device, cuda: Device) -> None:
    history, states = cuda.layer.kv_cache
    states = states.transpose(2, 3) if name == "TreeGatedDeltaNet" else states
    torch.testing.assert_close(history, cpu.layer.kv_cache[0])
    torch.testing.assert_close(states, cpu.layer.kv_cache[1], rtol=1e-4, atol=1e-4)


@KINDS
def test_histories_may_have_their_channels_first(name: str, make: Any, run: Any) -> None:
    cpu, cuda = made(name, make)
    history, *states = cuda.layer.kv_cache
    cuda.layer.kv_cache = (history.transpose(1, 2).contiguous(), *states)
    for seed in range(2):
        wanted = step(cpu, seed, run)
        with mock.patch.object(rows, "is_conv_state_dim_first", return_value=True):
            torch.testing.assert_close(step(cuda, seed, run), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cuda.layer.kv_cache[0].transpose(1, 2), cpu.layer.kv_cache[0])


@KINDS
@pytest.mark.parametrize("latest", [False, True])
def test_a_stage_advances_states_by_what_the_forward_of_the_paths_has_read(
    name: str, make: Any, run: Any, latest: bool
) -> None:
    """Control: the latest forward is another one."""
    cpu, cuda = made(name, make, pending=2)
    places: dict[str, list[torch.Tensor]] = {"cpu": [], "cuda": []}
    for seed in range(3):
        for of, own in zip((cpu, cuda), places.values(), strict=True):
            forward(of, seed, run)
            own.append(of.builder.kept.clone())
    for of, own in zip((cpu, cuda), places.values(), strict=True):
        commit(of, own[2 if latest and of is cuda else 1])
    if not latest:
        assert_equal_states(name, cpu, cuda)
        return
    with pytest.raises(AssertionError):
        assert_equal_states(name, cpu, cuda)


@KINDS
@pytest.mark.parametrize("broken", ["dropped", "doubled"])
def test_a_broken_commit_is_seen(name: str, make: Any, run: Any, broken: str) -> None:
    cpu, cuda = made(name, make)
    stock = type(cuda.layer).together

    def together(given: Any) -> Any:
        def advance(*commit: Any) -> None:
            for _ in range(2 if broken == "doubled" else 0):
                stock(given)(*commit)

        return advance

    with mock.patch.object(type(cuda.layer), "together", staticmethod(together)):
        step(cuda, 0, run)
    step(cpu, 0, run)
    assert not torch.allclose(step(cpu, 1, run), step(cuda, 1, run), rtol=1e-3, atol=1e-3)


@contextmanager
def counted() -> Iterator[Launches]:
    """Count operations of torch and launches of Triton's interpreter."""
    launches, stock = Launches("cpu"), InterpretedFunction.run

    def run(kernel: Any, *given: Any, **options: Any) -> None:
        launches.add()
        with _disable_current_modes():
            stock(kernel, *given, **options)

    with mock.patch.object(InterpretedFunction, "run", run), launches:
        yield launches


def of_a_commit(of: Device, count: int) -> int:
    """Return the launches of a commit in so many layers."""
    accepted = AcceptedPaths(torch.tensor([[0]]), torch.tensor([0]), torch.tensor([0]))
    keep = committer([of.layer] * count, REQUESTS)
    with counted() as launches:
        keep(accepted, of.builder.kept)
    return launches.counts.total()


@KINDS
def test_launches_are_few(name: str, make: Any, run: Any) -> None:
    """A tree takes three in a layer, and a commit as many in four layers as in one.

    Control: committed one by one, four layers take more.
    """
    _, cuda = made(name, make)
    stock, of_trees = type(cuda.layer).through, []

    def through(*given: Any) -> None:
        with counted() as launches:
            stock(*given)
        of_trees.append(launches.counts.total())

    with mock.patch.object(type(cuda.layer), "through", through):
        step(cuda, 0, run)
    assert of_trees == [3]
    together, each = (of_a_commit(cuda, count) for count in (4, 1))
    assert together == each
    grouped = type(cuda.layer).together

    def one_by_one(layers: Any) -> Any:
        kept = [grouped([layer]) for layer in layers]
        return lambda *commit: [keep(*commit) for keep in kept]

    with mock.patch.object(type(cuda.layer), "together", staticmethod(one_by_one)):
        assert of_a_commit(cuda, 4) - each == 3 * 2
