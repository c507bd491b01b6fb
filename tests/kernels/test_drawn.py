"""Check what drawn trees are drawn from on the CPU, and their compiled traversal."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="the columns of requests belong to the engine")

import numpy as np
import torch
from drawn_checks import DrawnChecks

from dyntree_kernels.cpu import drawn
from dyntree_kernels.cpu.drawn import decide_trees


class TestTheCompiledTraversal(DrawnChecks):
    decide = staticmethod(decide_trees)


@pytest.mark.parametrize("kept", [1, 5, 40, 60])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 4.0, 100.0])
def test_the_best_tokens_are_offered_and_of_equals_the_lowest(kept: int, spread: float) -> None:
    g = torch.Generator().manual_seed(kept)
    row = torch.randint(6, (50,), generator=g) - 2 + spread * torch.randn(50, generator=g)
    row[5::9] = 0 * row[5::9]  # also -0
    row[::7] = -torch.inf
    scores, tokens = np.empty(kept, np.float32), np.empty(kept, np.int64)
    count = drawn._offered(row.numpy(), np.float32(2), scores, tokens)
    some = ((float(x) / 2, n) for n, x in enumerate(row) if x > row.max() - 208)
    wanted = sorted((-score, n) for score, n in some)[:kept]
    assert list(zip((-scores).tolist(), tokens.tolist(), strict=True))[:count] == wanted
    for value in (torch.nan, torch.inf):
        row[3] = value
        assert not drawn._offered(row.numpy(), np.float32(2), scores, tokens)
    assert not drawn._offered(np.full(50, -np.inf, np.float32), np.float32(2), scores, tokens)
