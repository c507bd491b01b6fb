"""Ranks whose trees differ are named, with what differs."""

from __future__ import annotations

import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip

import multiprocessing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from dyntree_plugin.engine import agreement
from dyntree_plugin.engine.agreement import check_ranks, differences


def test_every_difference_is_named_with_its_ranks() -> None:
    told = [{"width": 4, "rule": "match"}, {"width": 8, "rule": "match", "head": "eagle3"}]
    assert differences(told) == [
        "width (rank 0: 4, rank 1: 8)",
        "head (rank 0: None, rank 1: eagle3)",
    ]


def _rank(rank: int, widths: list[int | None], folder: str, found: Any) -> None:
    """Be a rank of two, with trees of a width or without any."""
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=2)
    ranks = SimpleNamespace(world_size=2, cpu_group=torch.distributed.group.WORLD)
    with (
        mock.patch.object(agreement, "get_world_group", return_value=ranks),
        mock.patch.object(agreement, "trees_of", lambda config: {"width": config}),
        # A busy machine may start the ranks seconds apart.
        mock.patch.object(agreement, "WAIT", timedelta(seconds=3 if None in widths else 100)),
    ):
        error = None
        if widths[rank] is None:
            found.get()  # It waits for the other rank's error, as a rank without trees goes on.
        else:
            try:
                check_ranks(widths[rank])  # type: ignore[arg-type]
            except (ValueError, RuntimeError) as raised:  # the test waits for what is put
                error = str(raised)
        found.put((rank, error))


@pytest.mark.parametrize(
    ("widths", "reason"),
    [
        ([4, 4], None),
        ([4, 8], "differ in width (rank 0: 4, rank 1: 8)"),
        ([4, None], "a rank of this engine ended or has no trees"),
    ],
)
def test_ranks_compare_their_trees(
    widths: list[int | None], reason: str | None, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    queues = [context.SimpleQueue() for _ in widths]
    processes = [
        context.Process(target=_rank, args=(rank, widths, str(tmp_path), queues[rank]))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    with_trees = [rank for rank, width in enumerate(widths) if width is not None]
    errors = [queues[rank].get()[1] for rank in with_trees]
    for rank in {*range(2)} - {*with_trees}:
        queues[rank].put(None)
    for process in processes:
        process.join(60)
    for error in errors:
        assert error is None if reason is None else reason in error
