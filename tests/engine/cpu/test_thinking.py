"""The forced end of a thought, where vLLM's own kernel writes beyond the row."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.worker.gpu.sample.thinking_budget import apply_thinking_budget

VOCABULARY, BEYOND = 8, 4


def forced(end: int) -> torch.Tensor:
    """Return zero logits of two rows, whose thoughts must end with this token, and what lies
    behind each row."""

    def int32(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    rows, marker = torch.arange(2), int32(end)
    texts, lengths = torch.tensor([[1, 5], [1, 5]], dtype=torch.int32), int32(2, 2)
    memory, nowhere = torch.zeros(2, VOCABULARY + BEYOND), [int32(-1, -1) for _ in range(2)]
    apply_thinking_budget(
        memory[:, :VOCABULARY], rows, rows, int32(1, 1), texts, lengths, int32(5, 5), int32(0, 0),
        *nowhere, int32(0, 0), int32(1), marker, marker,
    )  # fmt: skip
    return memory


@pytest.mark.parametrize("end", [VOCABULARY - 1, VOCABULARY, VOCABULARY + BEYOND - 1])
def test_a_token_beyond_the_vocabulary_is_not_forced(end: int) -> None:
    expected = torch.zeros(2, VOCABULARY + BEYOND)
    if end < VOCABULARY:
        expected[:, end] = 1e9
    assert torch.equal(forced(end), expected)
