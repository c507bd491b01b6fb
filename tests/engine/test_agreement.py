"""Ranks whose trees differ are named, with what differs."""

from __future__ import annotations

import vllm.v1.worker.cpu.shm  # noqa: F401  isort: skip

import multiprocessing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from dyntree_plugin.engine import agreement
from dyntree_plugin.engine.agreement import check_ranks, differences


def test_every_difference_is_named_with_its_ranks() -> None:
    told = [{"width": 4, "rule": "match"}, {"width": 8, "rule": "match", "head": "eagle3"}]
    assert differences(told) == [
        "width (rank 0: 4, rank 1: 8)",
        "head (rank 0: None, rank 1: eagle3)",
    ]


CASES: list[tuple[list[int | None], str | None]] = [
    ([4, 4], None),
    ([4, 8], "differ in width (rank 0: 4, rank 1: 8)"),
    ([4, None], "a rank of this engine ended or has no trees"),
]
"""Widths of two ranks, None for a rank without trees, and what they are told."""


def _rank(rank: int, folder: str, told: Any, failed: Any) -> None:
    """Be a rank of two, and tell the error of every case."""
    for number, (widths, _) in enumerate(CASES):
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        store = f"file://{folder}/{number}"
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
                failed.wait()  # as a rank without trees goes on
            else:
                try:
                    check_ranks(widths[rank])  # type: ignore[arg-type]
                except (ValueError, RuntimeError) as raised:  # the test waits for what is put
                    error = str(raised)
        told.put(error)
    failed.set()


def test_ranks_compare_their_trees(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    told, failed = [context.SimpleQueue() for _ in range(2)], context.Event()
    processes = [
        context.Process(target=_rank, args=(rank, str(tmp_path), told[rank], failed))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for widths, reason in CASES:
        for width, of_rank in zip(widths, told, strict=True):
            error = of_rank.get()
            assert error is None if reason is None or width is None else reason in error
    for process in processes:
        process.join(60)
