"""How good a model is on the held-out modules. How well a draft follows the target is measured with
the engine: `dyntree bench serve`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.pair.train import token_stream


@dataclass(frozen=True)
class HeldOutLoss:
    nats_per_token: float
    bits_per_byte: float


@torch.no_grad()
def held_out_loss(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    *,
    length: int = 256,
    rows: int | None = None,
) -> HeldOutLoss:
    """Loss over `texts` cut into rows of `length` tokens, or over `rows` rows spread evenly."""
    stream = token_stream(texts, tokenizer)
    bytes_per_token = sum(len(text.encode()) for text in texts) / (len(stream) - len(texts))
    windows = stream.unfold(0, length + 1, length)
    if rows is not None:
        windows = windows[torch.linspace(0, len(windows) - 1, rows).long()]
    total = 0.0
    for batch in torch.split(windows, 16):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
        total += float(cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
    nats = total / (len(windows) * length)
    return HeldOutLoss(nats, nats / math.log(2) / bytes_per_token)
