"""Ways to break what parameters and grammars read on the rows of trees; `sabotage` offers them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def _paths(runner: Any, change: Any) -> Iterator[None]:
    """Find paths with ``change``, which gets the arguments of `PathsOf` and the stock function."""
    (processors,) = runner.sampler.logits_processors
    stock = processors._paths_of

    def paths_of(*given: Any) -> Any:
        return change(stock, *given)

    with mock.patch.object(processors, "_paths_of", paths_of):
        yield


@contextmanager
def without_paths(runner: Any) -> Iterator[None]:
    """Let sampling parameters on a tree's rows read the committed tokens alone."""

    def change(stock: Any, *given: Any) -> Any:
        found = stock(*given)
        return found._replace(lengths=torch.zeros_like(found.lengths))

    with _paths(runner, change):
        yield


@contextmanager
def rows_as_paths(runner: Any) -> Iterator[None]:
    """Let sampling parameters take the rows before a row for its path, as in a chain."""

    def change(stock: Any, parents: torch.Tensor, *given: Any) -> Any:
        chain = torch.arange(parents.shape[1], device=parents.device) - 1
        return stock(chain.expand_as(parents).contiguous(), *given[:-1], parents.shape[1])

    with _paths(runner, change):
        yield


@contextmanager
def unfollowed(runner: Any) -> Iterator[None]:
    """Draft without regard to grammars. Output must not change."""
    stock = runner.grammars.followers

    def followers(slots: torch.Tensor) -> dict[int, Any]:
        stock(slots)  # The ranks ask each other.
        return {}

    with mock.patch.object(runner.grammars, "followers", followers):
        yield


@contextmanager
def list_order(runner: Any) -> Iterator[None]:
    """Tell the scheduler that every node's parent is the node before it."""
    stock = runner.trees.parents_of

    def parents_of(slots: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = stock(slots)
        found[:, 1:] = torch.arange(found.shape[1] - 1) - 1
        return found

    with mock.patch.object(runner.trees, "parents_of", parents_of):
        yield


@contextmanager
def free_nodes(runner: Any) -> Iterator[None]:
    """Restrict what follows a tree's root, and nothing that follows a node."""
    from dyntree_plugin.engine.grammar.walk import ANY, GrammarWalk

    stock = GrammarWalk.fill

    def fill(self: Any, tree: Any) -> None:
        stock(self, tree)
        self._bitmask[self._first + 1 : self._first + 1 + len(tree.tokens)] = ANY

    with mock.patch.object(GrammarWalk, "fill", fill):
        yield


BROKEN = (without_paths, rows_as_paths, unfollowed, list_order, free_nodes)
