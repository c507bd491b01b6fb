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
def test_the_best_tokens_are_offered_and_of_equals_the_lowest(kept: int) -> None:
    row = torch.randint(6, (50,), generator=torch.Generator().manual_seed(kept)).float()
    row[::7] = -torch.inf
    scores, tokens = np.empty(kept, np.float32), np.empty(kept, np.int64)
    assert drawn._offered(row.numpy(), np.float32(2), scores, tokens)
    wanted = sorted((-float(x) / 2, n) for n, x in enumerate(row) if x > -torch.inf)[:kept]
    assert list(zip((-scores).tolist(), tokens.tolist(), strict=True))[: len(wanted)] == wanted
    assert (scores[len(wanted) :] == -np.inf).all()
    for value in (torch.nan, torch.inf):
        row[3] = value
        assert not drawn._offered(row.numpy(), np.float32(2), scores, tokens)
