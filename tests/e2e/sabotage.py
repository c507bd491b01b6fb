"""Ways to break the mechanism that a tree's output rests on, one at a time.

Each takes the engine's model runner and is in force within its context.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

NAMES = ("without_kv_move", "chain_positions", "wrong_ancestor_bit", "wrong_child")


@contextmanager
def verified_eagerly(runner: Any) -> Iterator[None]:
    """On CUDA: without the graphs, which hold what they were captured with."""
    with mock.patch.object(runner.rejection_sampler, "graphs", None, create=True):
        yield


@contextmanager
def without_kv_move(runner: Any) -> Iterator[None]:
    """The accepted path's keys and values stay where the tree put them."""
    with verified_eagerly(runner), mock.patch.object(runner, "_movers", []):
        yield


@contextmanager
def chain_positions(runner: Any) -> Iterator[None]:
    """Every node has the position of its row, as in a chain."""
    stock = runner._place_nodes

    def place(batch: Any) -> Any:
        linear = batch.positions.clone()
        mask = stock(batch)
        batch.positions.copy_(linear)
        return mask

    with mock.patch.object(runner, "_place_nodes", place):
        yield


@contextmanager
def wrong_ancestor_bit(runner: Any) -> Iterator[None]:
    """The second node of every tree sees the first if it should not, and the other way round."""
    stock = runner._place_nodes

    def place(batch: Any) -> Any:
        mask = stock(batch)
        second = batch.logits_indices[batch.expanded_local_pos == 2]
        mask.ancestor_bits[second, 0] ^= 1 << 1
        return mask

    with mock.patch.object(runner, "_place_nodes", place):
        yield


@contextmanager
def padding_as_tree(runner: Any) -> Iterator[None]:
    """Rows that fill up a request with one token of its prompt left are taken for a tree, which
    sees the context alone."""
    stock = runner._place_nodes

    def place(batch: Any) -> Any:
        mask = stock(batch)
        starts, lengths = batch.query_start_loc_np, batch.num_scheduled_tokens
        for request in range(batch.num_reqs):
            if batch.is_prefilling_np[request] and batch.num_draft_tokens_per_req[request]:
                first = int(starts[request])
                mask.ancestor_bits[first : first + int(lengths[request])] = 0
                mask.ctx_lens[request] = batch.seq_lens[request] - int(lengths[request])
        return mask

    with mock.patch.object(runner, "_place_nodes", place):
        yield


@contextmanager
def wrong_child(runner: Any) -> Iterator[None]:
    """Verification accepts every tree's first node, whatever its token is."""
    kind = type(runner.rejection_sampler)
    stock = kind._verify

    def verify(self: Any, packed: torch.Tensor, sampled: torch.Tensor, *others: Any) -> Any:
        ids = self._buffers.input_ids
        trees = packed[packed[:, 2] > 0].to(ids.device)
        honest = ids.clone()
        ids[trees[:, 3] + 1] = sampled[trees[:, 1]].to(ids.dtype)
        found = stock(self, packed, sampled, *others)
        ids.copy_(honest)
        return found

    with mock.patch.object(kind, "_verify", verify):
        yield


@contextmanager
def broken_draft(runner: Any) -> Iterator[None]:
    """No sabotage of ours: some rows of the draft's logits have no distribution, and some tokens
    leave NaN in its cache."""
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
    """No sabotage of ours: the target's logits are not all finite behind some contexts."""
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
    """A rule that reads draws accepts every child that has any chance."""
    from dyntree_plugin.engine.step import verify

    with mock.patch.object(verify, "uniform", torch.zeros_like):
        yield


@contextmanager
def branches(runner: Any) -> Iterator[None]:
    """What needs rows in the order of a chain meets trees that branch."""
    with mock.patch("dyntree_plugin.engine.runner.chain_reason", return_value=None):
        yield


@contextmanager
def learns_nothing(runner: Any) -> Iterator[None]:
    """Nodes keep the values that they have without learning."""
    with mock.patch.object(runner, "learn"):
        yield


@contextmanager
def draws_other_seeds(runner: Any) -> Iterator[None]:
    """Requests without a seed get another one than they would."""
    stock = np.random.randint

    def randint(*bounds: Any) -> Any:
        return stock(*bounds) ^ 1

    with mock.patch.object(np.random, "randint", randint):
        yield


@contextmanager
def captured(runner: Any) -> Iterator[None]:
    """No sabotage: verification and drafting as CUDA graphs make them, in padded batches at fixed
    addresses, each step with another number of draft forwards. Replaying runs the captured call
    again."""
    from vllm.config import CUDAGraphMode

    from dyntree_plugin.engine.cuda.speculator import GraphedTreeSpeculator
    from dyntree_plugin.engine.cuda.verification import GraphedTreeVerifier

    replayed: dict[str, list[int]] = {"verification": [], "drafting": []}

    def recorder(kind: str) -> Any:
        def record(run: Any) -> Any:
            values = run()

            def replay() -> None:
                # What passes values on by its own memory gives none.
                replayed[kind].extend(map(len, values))
                for value, new in zip(values, run(), strict=True):
                    value.copy_(new)

            return replay, values

        return record

    speculator, verifier = runner.speculator, runner.rejection_sampler
    stock = type(speculator), type(verifier)
    graphed = type("Graphed", (GraphedTreeSpeculator, stock[0]), {})
    speculator.__class__, verifier.__class__ = graphed, GraphedTreeVerifier
    numbers = itertools.cycle(range(1 + len(speculator.growing.widths)))
    propose, forwards = stock[0].propose, set()

    def with_another_number(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.most_forwards = next(numbers)
        drafts = propose(self, *args, **kwargs)
        forwards.add(self.forwards)
        return drafts

    try:
        with torch.inference_mode():
            speculator.init_cudagraph_manager(CUDAGraphMode.FULL)
            speculator.capture_drafting(recorder("drafting"))
            verifier.capture(recorder("verification"), runner.max_num_reqs)
        with mock.patch.object(graphed, "propose", with_another_number):
            yield
    finally:
        speculator.__class__, verifier.__class__ = stock
        speculator.most_forwards = None
    for kind, sizes in replayed.items():
        if len(set(sizes)) < 2:
            raise RuntimeError(f"{kind}: batches of {sorted(set(sizes))} requests were replayed")
    if speculator._finishing and forwards != {*range(1, 2 + len(speculator.growing.widths))}:
        raise RuntimeError(f"trees of {sorted(forwards)} draft forwards were grown")


@contextmanager
def waiting_is_an_error(runner: Any) -> Iterator[None]:
    """No sabotage: on CUDA, whatever waits for the device while trees are placed, verified and
    grown raises."""
    with ExitStack() as stack:
        for owner, name in (
            (type(runner), "_place_nodes"),
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
