"""Requests are packed once as long as their numbers stay the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dyntree_plugin.engine.step.requests import Packer


def batch() -> Any:
    """Return two requests with trees of 4 nodes, in slots 3 and 1."""
    return SimpleNamespace(
        num_reqs=2,
        idx_mapping_np=np.array([3, 1]),
        cu_num_logits_np=np.array([0, 5, 10], dtype=np.int32),
        query_start_loc_np=np.array([0, 5, 10], dtype=np.int32),
        prefill_len_np=np.array([7, 8], dtype=np.int32),
    )


def states() -> Any:
    return SimpleNamespace(
        temperature=SimpleNamespace(np=np.linspace(0, 2, 5, dtype=np.float32)),
        seeds=SimpleNamespace(np=np.arange(5) - (1 << 40)),
    )


def test_requests_are_packed_anew_if_any_number_of_theirs_is_another() -> None:
    pack, of_batch, of_slots, longest = Packer(), batch(), states(), np.arange(5) + 100
    numbers = [each for each in vars(of_batch).values() if isinstance(each, np.ndarray)]
    numbers += [of_slots.temperature.np, of_slots.seeds.np, longest]
    assert len(numbers) == 7
    for array in numbers:
        before = pack(of_batch, of_slots, longest)
        assert pack(of_batch, of_slots, longest) is before
        array[1] += 1
        after = pack(of_batch, of_slots, longest)
        assert not torch.equal(after, before)
        assert torch.equal(after, Packer()(of_batch, of_slots, longest))
        array[1] -= 1
