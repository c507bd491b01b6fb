"""The packed array of a batch is read but never written, because drafting reads it again."""

from __future__ import annotations

import pytest
import torch

from dyntree_plugin.engine.step.requests import PADDING, Requests

SEED, TEMPERATURE, SPARE = -5, 0.75, 9


def packed(requests: int) -> torch.Tensor:
    """Return an array of requests. If there are several, the last one is padding."""
    bits = torch.tensor(TEMPERATURE).view(torch.int32).item()
    rows = torch.tensor([[3, 4, 2, 6, 10, bits, SEED, 1]]).repeat(requests, 1)
    rows[1:][-1:] = PADDING
    return rows


@pytest.mark.parametrize("requests", [1, 2, 3])
def test_reading_requests_leaves_the_array_as_it_is(requests: int) -> None:
    array = packed(requests)
    read = Requests(array, SPARE)
    names = ("index", "classes", "slots", "first", "drafts", "root", "prefill_len")
    numbers = [getattr(read, name)[0].item() for name in names]
    assert numbers == [3, 1, 3, 4, 2, 6, 10]
    assert read.temperature[0].item() == TEMPERATURE
    assert read.seeds[0].item() == SEED
    if requests > 1:
        assert [getattr(read, name)[-1].item() for name in names] == [-1, -1, SPARE, 0, 0, 0, 0]
    assert torch.equal(array, packed(requests))
