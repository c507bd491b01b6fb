"""Requests are packed once as long as their numbers stay the same, and read as they are packed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dyntree_plugin.engine.step.requests import PADDING, Packer, Requests
from dyntree_plugin.tree.value import temperature_class


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


def test_reading_requests_gives_what_was_packed_and_leaves_the_array_as_it_is() -> None:
    packed = Packer()(batch(), states(), np.arange(5) + 100)
    array = torch.cat([packed, torch.full_like(packed[:1], PADDING)])
    before, read = array.clone(), Requests(array, spare=9)
    assert read.index.tolist() == [3, 1, -1]
    assert read.slots.tolist() == [3, 1, 9]
    assert read.first.tolist() == [0, 5, 0]
    assert read.root.tolist() == [0, 5, 0]
    assert read.drafts.tolist() == [4, 4, 0]
    assert read.prefill_len.tolist() == [7, 8, 0]
    assert read.temperature[:2].tolist() == [1.5, 0.5]
    assert read.classes[:2].tolist() == temperature_class(read.temperature[:2]).tolist()
    assert len(read.classes[:2].unique()) == 2
    assert read.longest[:2].tolist() == [103, 101]
    assert read.seeds[:2].tolist() == [3 - (1 << 40), 1 - (1 << 40)]
    assert torch.equal(array, before)
