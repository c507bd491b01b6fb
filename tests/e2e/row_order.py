"""A logits processor that reads the token before a row from the row above, as in a chain."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

APART = 3


class Apart(LogitsProcessor):
    """Make sure that a token and the one two places before it never sum to a multiple of
    `APART`."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self._states = req_states

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        slots = ctx.expanded_idx_mapping.long()
        committed = self._states.all_token_ids.gpu[slots, (ctx.pos - 1).clamp(min=0)]
        before = torch.where(ctx.expanded_local_pos > 0, ctx.input_ids.roll(1), committed)
        tokens = torch.arange(logits.shape[1], device=logits.device)
        forbidden = (before.long()[:, None] + tokens) % APART == 0
        return logits.masked_fill_(forbidden, float("-inf"))
