"""Ways to break one mechanism at a time that output depends on.

Each takes the engine's model runner and is in force within its context. Those marked "Output must
not change" break nothing that output depends on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import adapters
import numpy as np
import sabotage_of_bits
import sabotage_of_bits_on_cuda
import sabotage_of_blocks
import sabotage_of_caches
import sabotage_of_heads
import sabotage_of_images
import sabotage_of_latent
import sabotage_of_paths
import sabotage_of_positions
import sabotage_of_states
import sabotage_of_weights
import sabotage_of_windows
import torch

NAMES = ("without_kv_move", "chain_positions", "wrong_ancestor_bit", "wrong_child")
OF_HEADS = ("broken_head", "other_rows", "other_parents")
"""These break what a head reads. Output must not change."""
OF_PATHS = ("without_paths", "rows_as_paths")
"""These break what sampling parameters read on a tree's rows."""

_OTHERS = (
    adapters,
    sabotage_of_bits,
    sabotage_of_bits_on_cuda,
    sabotage_of_blocks,
    sabotage_of_caches,
    sabotage_of_heads,
    sabotage_of_images,
    sabotage_of_latent,
    sabotage_of_paths,
    sabotage_of_positions,
    sabotage_of_states,
    sabotage_of_weights,
    sabotage_of_windows,
)
globals().update({each.__name__: each for module in _OTHERS for each in module.BROKEN})


@contextmanager
def verified_eagerly(runner: Any) -> Iterator[None]:
    """Verify without graphs on CUDA, because graphs keep what they were captured with.

    A pipeline's earlier stages verify nothing.
    """
    with ExitStack() as stack:
        if hasattr(runner, "graphs"):
            stack.enter_context(mock.patch.object(runner.graphs, "verification", return_value=None))
        yield


@contextmanager
def placing(change: Any) -> Iterator[None]:
    """Place nodes with ``change``, which gets the batch and a call of the original function."""
    from dyntree_plugin.engine import stage

    stock = stage.place_nodes

    def place(batch: Any, *given: Any, **named: Any) -> Any:
        return change(batch, lambda: stock(batch, *given, **named))

    with mock.patch.object(stage, "place_nodes", place):
        yield


@contextmanager
def without_kv_move(runner: Any) -> Iterator[None]:
    """Leave the accepted path's keys and values where the tree put them."""
    with verified_eagerly(runner), mock.patch.object(runner, "keepers", []):
        yield


@contextmanager
def chain_positions(runner: Any) -> Iterator[None]:
    """Give every node the position of its row, as in a chain."""

    def place(batch: Any, stock: Any) -> Any:
        linear, mask = batch.positions.clone(), stock()
        batch.positions.copy_(linear)
        return mask

    with placing(place):
        yield


@contextmanager
def wrong_ancestor_bit(runner: Any) -> Iterator[None]:
    """Invert whether the second node of every tree sees the first."""

    def place(batch: Any, stock: Any) -> Any:
        mask = stock()
        second = batch.logits_indices[batch.expanded_local_pos == 2]
        mask.ancestor_bits[second, 0] ^= 1 << 1
        return mask

    with placing(place):
        yield


@contextmanager
def padding_as_tree(runner: Any) -> Iterator[None]:
    """Treat the rows that fill up a request with one prompt token left as a tree.

    These rows then see the context alone.
    """

    def place(batch: Any, stock: Any) -> Any:
        mask = stock()
        starts, lengths = batch.query_start_loc_np, batch.num_scheduled_tokens
        for request in range(batch.num_reqs):
            if batch.is_prefilling_np[request] and batch.num_draft_tokens_per_req[request]:
                mask.ancestor_bits[int(starts[request]) : int(starts[request + 1])] = 0
                mask.ctx_lens[request] = batch.seq_lens[request] - int(lengths[request])
        return mask

    with placing(place):
        yield


@contextmanager
def wrong_child(runner: Any) -> Iterator[None]:
    """Accept every tree's first node, whatever its token is."""
    stock = runner.verifier.verify

    def verify(packed: torch.Tensor, sampled: torch.Tensor, *others: Any) -> Any:
        ids = runner.verifier.buffers.input_ids
        trees = packed[packed[:, 2] > 0].to(ids.device)
        honest = ids.clone()
        ids[trees[:, 3] + 1] = sampled[trees[:, 1]].to(ids.dtype)
        found = stock(packed, sampled, *others)
        ids.copy_(honest)
        return found

    with mock.patch.object(runner.verifier, "verify", verify):
        yield


@contextmanager
def broken_draft(runner: Any) -> Iterator[None]:
    """Make some of the draft's logits not finite, and some tokens write NaN to its cache.

    Output must not change.
    """
    calls, model = itertools.count(), runner.speculator.model
    embedding = model.model.embed_tokens
    stock_logits, stock_embedding = model.compute_logits, embedding.forward

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits, first = stock_logits(*args, **kwargs), next(calls)
        logits[first % 3 :: 3, 7] = torch.nan
        logits[first % 5 :: 5, 11] = torch.inf
        logits[first % 7 :: 7] = -torch.inf
        return logits

    def embed(ids: torch.Tensor) -> torch.Tensor:
        return stock_embedding(ids).masked_fill((ids % 128 == 77)[..., None], torch.nan)

    with (
        mock.patch.object(model, "compute_logits", compute_logits),
        mock.patch.object(embedding, "forward", embed),
    ):
        yield


@contextmanager
def broken_target(runner: Any) -> Iterator[None]:
    """Make the target's logits not finite after some contexts.

    Output must be that of the engine without trees under the same sabotage.
    """
    model = runner.model
    stock = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = stock(*args, **kwargs)
        kind = logits.argmax(dim=1) % 16
        logits[kind == 3, 5] = torch.nan
        logits[kind == 4, 9] = torch.inf
        logits[kind == 5] = torch.nan
        logits[kind == 6, 2::3] = -torch.inf
        return logits

    with mock.patch.object(model, "compute_logits", compute_logits):
        yield


@contextmanager
def always_accepted(runner: Any) -> Iterator[None]:
    """Make rules for drawn children accept every child whose chance is above 0.

    An adaptive budget verifies all of them, whatever a step costs on this machine.
    """
    from dyntree_plugin.engine.budget.by_tree import TreeBudget
    from dyntree_plugin.engine.drawn import samples
    from dyntree_plugin.engine.papers import walk

    trees = samples.DrawnTrees

    def offered_less(laws: Any, *others: Any) -> Any:
        return trees(laws._replace(chances=1e-6 * laws.chances), *others)

    with (
        mock.patch.object(walk, "uniform", torch.zeros_like),
        mock.patch.object(samples, "DrawnTrees", offered_less),
        mock.patch.object(TreeBudget, "cut", lambda _, values, counts, *given: counts),
        mock.patch.object(TreeBudget, "drafting_pays", return_value=True),
    ):
        yield


@contextmanager
def forgotten(runner: Any) -> Iterator[None]:
    """Verify the drafts of vLLM's chain as if it had found every token equally likely."""
    stock = runner.speculator.propose

    def propose(*given: Any, **named: Any) -> Any:
        found = stock(*given, **named)
        runner.speculator.draft_logits.zero_()
        return found

    with mock.patch.object(runner.speculator, "propose", propose):
        yield


@contextmanager
def learns_nothing(runner: Any) -> Iterator[None]:
    """Switch learning off, so that nodes keep the draft's values."""
    with mock.patch.object(runner.ops, "learn"):
        yield


@contextmanager
def draws_other_seeds(runner: Any) -> Iterator[None]:
    """Give requests without a seed another one than they would get."""
    stock = np.random.randint

    def randint(*bounds: Any) -> Any:
        return stock(*bounds) ^ 1

    with mock.patch.object(np.random, "randint", randint):
        yield


class _Guesses:
    """Tries of one path of six random tokens, each of which is said to be almost certain."""

    def __init__(self, tries: Any, nodes: int) -> None:
        self.roots = tries.roots
        self._nodes = nodes

    def trie(self, slots: torch.Tensor) -> Any:
        from dyntree_kernels.tries import Trie

        found = Trie.room(len(slots), self._nodes, slots.device)
        node = torch.arange(self._nodes)
        found.tokens.copy_((7 * self.roots(slots) + slots)[:, None] % 487 + node)
        found.above.copy_((node - 1).expand_as(found.above))
        found.evidence.fill_(3.0)
        found.exists.copy_((slots >= 0)[:, None] & (node < 6))
        return found


@contextmanager
def guesses(runner: Any) -> Iterator[None]:
    """Look up nothing, and guess instead. Output must not change."""
    stages, nodes = runner.speculator.drafter.stages, runner.trees.shape.grafts
    with mock.patch.object(stages, "_tries", _Guesses(stages._tries, nodes)):
        yield


@contextmanager
def unranked(runner: Any) -> Iterator[None]:
    """Rank the draft's logits as if requests had no parameters. Output must not change."""
    with mock.patch.object(runner.speculator.drafter, "_ranking", None):
        yield


@contextmanager
def waiting_is_an_error(runner: Any) -> Iterator[None]:
    """Raise if the host waits for the device while trees are placed, verified and grown; on CUDA.

    Output must not change.
    """
    with ExitStack() as stack:
        for owner, name in (
            (type(runner), "place"),
            (type(runner.rejection_sampler), "__call__"),
            (type(runner.speculator), "propose"),
        ):
            stack.enter_context(mock.patch.object(owner, name, _strict(getattr(owner, name))))
        yield


def _strict(stock: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return stock(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return call
