"""Ways to break a mechanism that only a CUDA engine relies on, in addition to sabotage.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from sabotage import verified_eagerly


def placed_eagerly(runner: Any) -> Any:
    """Place nodes without a graph while the result is entered."""
    return mock.patch.object(runner.graphs, "_placing", None)


@contextmanager
def placing_rests(runner: Any) -> Iterator[None]:
    """Leave the positions and the masks of nodes as the last batch without a graph left them."""
    with mock.patch.object(runner.graphs._placing, "replay", return_value=()):
        yield


@contextmanager
def tree_moves(runner: Any) -> Iterator[None]:
    """Place from another address of the trees' ancestors than captured drafting writes to."""
    trees = runner.trees
    captured, trees.ancestors = trees.ancestors, trees.ancestors.clone()
    try:
        with placed_eagerly(runner):
            yield
    finally:
        trees.ancestors = captured


@contextmanager
def stale_masks(runner: Any) -> Iterator[None]:
    """Give the target's graphs the ancestor bits of another batch."""
    from dyntree_plugin.engine.attention.buffers import MaskBuffers

    stock = MaskBuffers.fill

    def fill(self: Any, *args: Any, **mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        bits = self._bits.clone()
        found = stock(self, *args, **mask)
        self._bits.copy_(bits)
        return found

    # Masks that lie in the buffers already would not be another batch's.
    elsewhere = mock.patch.object(runner.ops, "masks", None)
    with elsewhere, placed_eagerly(runner), mock.patch.object(MaskBuffers, "fill", fill):
        yield


def graphs_of_one_size(runner: Any) -> Any:
    """Give no graph to trees of different sizes. Output must not change."""
    return mock.patch.object(runner, "_tree_rows", ())


@contextmanager
def rows_of_another(runner: Any) -> Iterator[None]:
    """Let the target's graphs read the numbers of rows of a batch's requests in reverse order."""
    manager, starts = runner.cudagraph_manager, runner.input_buffers.query_start_loc
    stock = manager.run_fullgraph

    def run(desc: Any) -> Any:
        own, rows = starts.clone(), torch.diff(starts)
        real = int((rows > 0).sum())
        starts[1 : 1 + real] = rows[:real].flip(0).cumsum(0)
        found = stock(desc)
        starts.copy_(own)
        return found

    with mock.patch.object(manager, "run_fullgraph", run):
        yield


@contextmanager
def padding_is_alive(runner: Any) -> Iterator[None]:
    """Let padding rows of a target graph write to the cache, at the first row's place."""
    stock = runner.prepare_attn

    def prepare_attn(batch: Any) -> Any:
        tables, slots = stock(batch)
        slots[:, batch.num_tokens :] = slots[:, :1]
        return tables, slots

    with mock.patch.object(runner, "prepare_attn", prepare_attn):
        yield


@contextmanager
def half_moves(runner: Any) -> Iterator[None]:
    """Leave the last half of every latent vector's bytes where the tree put them."""
    with _left(runner, lambda layer: layer.kv_cache[..., layer.kv_cache.shape[-1] // 2 :]):
        yield


@contextmanager
def scales_not_moved(runner: Any) -> Iterator[None]:
    """Leave the scales of packed latent vectors where the tree put them."""
    with _left(runner, lambda layer: layer.kv_cache[..., 512:528]):
        yield


@contextmanager
def values_not_moved(runner: Any) -> Iterator[None]:
    """Leave values that are smaller than keys where the tree put them."""
    with _left(runner, lambda layer: layer.kv_cache[..., layer.head_size :]):
        yield


@contextmanager
def _left(runner: Any, part: Callable[[Any], torch.Tensor]) -> Iterator[None]:
    """Leave a part of every layer's cache where the tree put it."""
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    parts = [part(layer) for layer in layers if hasattr(layer, "kv_cache")]

    def without(keeper: Any) -> Any:
        def keep(*given: Any) -> None:
            kept = [each.clone() for each in parts]
            keeper.keep(*given)
            for each, before in zip(parts, kept, strict=True):
                each.copy_(before)

        return keeper._replace(keep=keep)

    with (
        verified_eagerly(runner),
        mock.patch.object(runner, "keepers", [*map(without, runner.keepers)]),
    ):
        yield


@contextmanager
def decays_of_other_channels(runner: Any) -> Iterator[None]:
    """Let every channel of a tree's keys decay as another one."""
    from dyntree_plugin.engine.states import cuda_layers

    stock = cuda_layers.gated_delta_rule

    def rolled(trees: Any, states: Any, q: Any, k: Any, v: Any, logs: Any, *others: Any) -> None:
        stock(trees, states, q, k, v, logs.roll(1, dims=-1), *others)

    with _eager(runner), mock.patch.object(cuda_layers, "gated_delta_rule", rolled):
        yield


@contextmanager
def states_lost(runner: Any) -> Iterator[None]:
    """Let a block draft keep zeros for the target's hidden states. Output must not change."""
    stock = runner.speculator.combine
    with mock.patch.object(runner.speculator, "combine", lambda hidden: 0 * stock(hidden)):
        yield


@contextmanager
def layout_confused(runner: Any) -> Iterator[None]:
    """Let the target run without graphs, and read a cache whose heads and slots seem to lie the
    other way."""
    from dyntree_kernels.cuda import attention, xqa

    def confused(cache: torch.Tensor) -> torch.Tensor:
        _, heads, slots, content = cache.shape
        of_heads, of_slots = content, heads * content
        if cache.stride(1) == content:
            of_heads, of_slots = slots * content, content
        strides = cache.stride(0), of_heads, of_slots, 1
        return cache.as_strided(cache.shape, strides)

    stock, of_xqa = attention.tree_attention, xqa.XqaTreeAttention.run
    with (
        _eager(runner),
        mock.patch.object(
            attention,
            "tree_attention",
            lambda q, cache, *a, **k: stock(q, confused(cache), *a, **k),
        ),
        mock.patch.object(
            xqa.XqaTreeAttention, "run", lambda x, q, cache, *a: of_xqa(x, q, confused(cache), *a)
        ),
    ):
        yield


@contextmanager
def lse_ignored(runner: Any) -> Iterator[None]:
    """Let the target run without graphs, and add trees to contexts as if each had one position
    with a score of zero."""
    from dyntree_kernels.cuda import cascade

    stock = cascade.tree_attention

    def attend(*given: Any, context_lse: torch.Tensor, **named: Any) -> None:
        stock(*given, context_lse=torch.zeros_like(context_lse), **named)

    with _eager(runner), mock.patch.object(cascade, "tree_attention", attend):
        yield


@contextmanager
def trees_in_contexts(runner: Any) -> Iterator[None]:
    """Let the target run without graphs, and read a tree's rows as a part of its context, too."""
    from dyntree_kernels.cuda.cascade import Cascade

    stock = Cascade.contexts

    def contexts(
        self: Any, q: Any, cache: Any, table: Any, lens: Any, starts: Any, rows: int
    ) -> Any:
        return stock(self, q, cache, table, lens + torch.diff(starts), starts, rows)

    with _eager(runner), mock.patch.object(Cascade, "contexts", contexts):
        yield


def _eager(runner: Any) -> Any:
    """Let the target run without graphs."""
    return mock.patch.object(runner.cudagraph_manager, "_graphs_captured", False)
