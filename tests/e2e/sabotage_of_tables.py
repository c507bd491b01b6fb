"""Ways to break the table that corrects a draft's logits. Output must not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def garbage_biases(runner: Any) -> Iterator[None]:
    """Fill the table with numbers that are not finite, and with tokens that there are not."""
    table = runner.correction.residuals.table
    g = torch.Generator().manual_seed(0)
    table.biases.copy_(8 * torch.randn(table.biases.shape, generator=g))
    for number, broken in enumerate((torch.nan, torch.inf, -torch.inf, 1e30, -3e38)):
        table.biases[number::7, number::5] = broken
    table.sums.copy_(torch.randn(table.sums.shape, generator=g))
    table.tokens.copy_(torch.randint(-99, 9999, table.tokens.shape, generator=g))
    table.tokens[::2] %= 512
    yield
    runner.correction.reset()


@contextmanager
def forgotten(runner: Any) -> Iterator[None]:
    """Begin with an empty table."""
    runner.correction.reset()
    yield


BROKEN = (garbage_biases, forgotten)
