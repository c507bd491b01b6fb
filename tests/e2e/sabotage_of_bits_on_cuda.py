"""Ways to break what equal bits depend on on CUDA, one at a time; `sabotage` says more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock


@contextmanager
def _builders(runner: Any, **changed: Any) -> Iterator[None]:
    """Change attributes of the target's builders, each by a function of the builder, and let the
    target run without graphs."""
    groups = (group for groups in runner.attn_groups for group in groups)
    builders = {id(b): b for b in (each.get_metadata_builder(0) for each in groups)}
    with ExitStack() as broken:
        manager = runner.cudagraph_manager
        broken.enter_context(mock.patch.object(manager, "_graphs_captured", False))
        for builder in builders.values():
            made = {name: function(builder) for name, function in changed.items()}
            broken.enter_context(mock.patch.multiple(builder, **made))
        yield


def plain_batches_by_vllm(runner: Any) -> Any:
    """Leave batches without trees to vLLM's kernel."""
    return _builders(runner, _same_bits=lambda _: False)


def columns_in_order(runner: Any) -> Any:
    """Sum a node's attention in the order of the tree's rows."""

    def plan(kernels: Any, rows: Any) -> Any:
        every = [kernel.plan(rows) for kernel in kernels]  # The last leaves plain rows alone.
        return lambda *of_layer: [launch(*of_layer) for launch in every]

    def kernel(builder: Any) -> Any:
        return SimpleNamespace(plan=partial(plan, (builder._kernel, builder._drafting_kernel)))

    return _builders(runner, _kernel=kernel)


def other_tiles(runner: Any) -> Any:
    """Sum all but single rows in tiles of another size."""
    from dyntree_kernels.cuda import path_attention

    tile = path_attention.Tiling(16, 32, 4, 2)

    def plan(stock: Any, rows: Any) -> Any:
        launch = stock.plan(rows)

        def narrow(*of_layer: Any) -> None:
            with mock.patch.object(path_attention, "path_tiling", return_value=tile):
                launch(*of_layer)

        return narrow if rows.max_rows > 1 else launch

    def kernel(builder: Any) -> Any:
        return SimpleNamespace(plan=partial(plan, builder._kernel))

    return _builders(runner, _kernel=kernel)


BROKEN = (plain_batches_by_vllm, columns_in_order, other_tiles)
