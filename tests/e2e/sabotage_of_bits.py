"""Ways to break one mechanism at a time on which equal bits depend; `sabotage` says more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock


@contextmanager
def sums_by_columns(runner: Any) -> Iterator[None]:
    """Sum a node's attention in the order of the tree's rows."""
    from dyntree_plugin.engine.attention import cpu

    stock = cpu.TreeAttention
    with mock.patch.object(cpu, "TreeAttention", lambda *rows, by_path, **of: stock(*rows, **of)):
        yield


@contextmanager
def plain_rows_by_vllm(runner: Any) -> Iterator[None]:
    """Leave rows without a tree to vLLM's kernel."""
    from dyntree_plugin.engine.attention import cpu

    stock = cpu.TreeCPUAttentionMetadataBuilder.build

    def build(self: Any, *given: Any, tree_mask: Any = None, **named: Any) -> Any:
        if tree_mask is not None and tree_mask.has_plain:
            tree_mask = replace(tree_mask, same_bits=False)
        return stock(self, *given, tree_mask=tree_mask, **named)

    with mock.patch.object(cpu.TreeCPUAttentionMetadataBuilder, "build", build):
        yield


BROKEN = (sums_by_columns, plain_rows_by_vllm)
