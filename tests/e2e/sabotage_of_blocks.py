"""Ways to break what block drafts read; `sabotage` offers them. Output must not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch


def _source(runner: Any) -> Any:
    return runner.speculator.drafter.stages._source


@contextmanager
def next_position(runner: Any) -> Iterator[None]:
    """Give nodes the logits of the position after theirs."""
    source = _source(runner)
    stock = source.forward

    def forward(rows: Any, *given: Any) -> Any:
        rows.positions.add_(1)
        return stock(rows, *given)

    with mock.patch.object(source, "forward", forward):
        yield


def ordered_block(runner: Any) -> AbstractContextManager[Any]:
    """Let a position of a block see those before it alone."""
    return mock.patch.object(runner.speculator, "causal", True)


@contextmanager
def stale_context(runner: Any) -> Iterator[None]:
    """Leave what the last block wrote where the state before the root belongs."""
    speculator, memory = runner.speculator, _source(runner)._memory
    stock = speculator.keep

    def keep(states: Any, positions: torch.Tensor, slots: dict[str, torch.Tensor]) -> None:
        last = torch.isin(positions, memory.root_positions - 1)
        stock(states, positions, {name: each.masked_fill(last, -1) for name, each in slots.items()})

    with mock.patch.object(speculator, "keep", keep):
        yield


@contextmanager
def forgotten_prefix(runner: Any) -> Iterator[None]:
    """Clear the draft's cache whenever a request begins with a prefix that was cached."""
    names = {*runner.speculator.draft_attn_layer_names}
    layers = runner.vllm_config.compilation_config.static_forward_context
    stock = runner.add_requests

    def add_requests(scheduled: Any) -> None:
        if any(each.num_computed_tokens for each in scheduled.scheduled_new_reqs):
            for name in names:
                layers[name].kv_cache.zero_()
        stock(scheduled)

    with mock.patch.object(runner, "add_requests", add_requests):
        yield


OF_CHAINS = (next_position, ordered_block, stale_context)
BROKEN = (*OF_CHAINS, forgotten_prefix)
