"""The benchmark's batches of several requests are what the kernel of trees takes."""

from __future__ import annotations

import pytest
import torch
from paged_cases import DEVICE

from benchmarks.kernels import cases


def test_a_batch_is_compared_with_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "LAYERS", 1)
    monkeypatch.setattr(cases, "DTYPE", torch.float32)  # The interpreter multiplies no bfloat16.
    batch = cases.make_batch(7, 20, 3, str(DEVICE))
    cases.triton(batch).launch(0)
    assert batch.error() < 2e-2
    alone = cases.make_batch(7, 20, 1, str(DEVICE))
    assert batch.bytes == 3 * alone.bytes
    assert batch.operations == 3 * alone.operations
    batch.ctx_lens[-1] -= 1
    cases.triton(batch).launch(0)
    assert batch.error() > 2e-2
    assert torch.isfinite(batch.out).all()
