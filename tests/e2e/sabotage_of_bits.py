"""Ways to break one mechanism at a time on which equal bits depend; `sabotage` says more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock


@contextmanager
def sums_by_columns(runner: Any) -> Iterator[None]:
    """Sum a node's attention in the order of the tree's rows."""
    from dyntree_plugin.engine.attention import cpu, latent_cpu

    with ExitStack() as patches:
        for module, name in ((cpu, "TreeAttention"), (latent_cpu, "LatentTreeAttention")):
            stock = getattr(module, name)

            def by_columns(*rows: Any, by_path: bool = False, of: Any = stock, **more: Any) -> Any:
                return of(*rows, **more)

            patches.enter_context(mock.patch.object(module, name, by_columns))
        yield


@contextmanager
def plain_rows_by_vllm(runner: Any) -> Iterator[None]:
    """Leave rows without a tree to vLLM's kernels."""
    from dyntree_plugin.engine.attention import cpu, latent_cpu

    with ExitStack() as patches:
        for builder in (cpu.TreeCPUAttentionMetadataBuilder, latent_cpu.LatentNumbaBuilder):

            def build(
                self: Any, *given: Any, tree_mask: Any = None, of: Any = builder.build, **more: Any
            ) -> Any:
                if tree_mask is not None and tree_mask.has_plain:
                    tree_mask = replace(tree_mask, same_bits=False)
                return of(self, *given, tree_mask=tree_mask, **more)

            patches.enter_context(mock.patch.object(builder, "build", build))
        yield


BROKEN = (sums_by_columns, plain_rows_by_vllm)
