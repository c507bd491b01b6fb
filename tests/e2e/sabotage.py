"""Ways to break the mechanism that a tree's output rests on, one at a time.

Each takes the engine's model runner and is in force within its context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

NAMES = ("without_kv_move", "chain_positions", "wrong_ancestor_bit", "wrong_child")


@contextmanager
def without_kv_move(runner: Any) -> Iterator[None]:
    """The accepted path's keys and values stay where the tree put them."""
    with mock.patch.object(runner, "_movers", []):
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
def wrong_child(runner: Any) -> Iterator[None]:
    """Verification accepts every tree's first node, whatever its token is."""
    from dyntree_plugin.engine import verifier

    stock = verifier.match

    def match(tokens: torch.Tensor, *others: Any) -> Any:
        sampled = others[4]
        return stock(torch.cat([sampled[:, :1], tokens[:, 1:]], dim=1), *others)

    with mock.patch.object(verifier, "match", match):
        yield


@contextmanager
def always_accepted(runner: Any) -> Iterator[None]:
    """A rule that reads draws accepts every child that has any chance."""
    from dyntree_plugin.engine import verifier

    with mock.patch.object(verifier, "uniform", torch.zeros_like):
        yield


@contextmanager
def learns_nothing(runner: Any) -> Iterator[None]:
    """Nodes keep the values that they have without learning."""
    with mock.patch.object(runner, "_learn"):
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
def captured_drafting(runner: Any) -> Iterator[None]:
    """No sabotage: drafting as CUDA graphs make it, in padded batches at fixed addresses. Replaying
    runs the captured call again."""
    from vllm.config import CUDAGraphMode

    from dyntree_plugin.engine.gpu.speculator import GraphedTreeSpeculator

    replayed: list[int] = []

    def record(run: Any) -> Any:
        value = run()

        def replay() -> None:
            replayed.append(len(value))
            value.copy_(run())

        return replay, value

    speculator = runner.speculator
    stock = type(speculator)
    speculator.__class__ = GraphedTreeSpeculator
    try:
        with torch.inference_mode():
            speculator.init_cudagraph_manager(CUDAGraphMode.FULL)
            for graphs in (speculator._decoding, speculator._growing):
                graphs.capture(record)
        yield
    finally:
        speculator.__class__ = stock
    if len(set(replayed)) < 2:
        raise RuntimeError(f"batches of {sorted(set(replayed))} requests were replayed")


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
