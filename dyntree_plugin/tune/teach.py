"""Let the target read texts once, and keep its distributions of the next token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedModel

from dyntree_plugin.tune.shards import TOP, Sample, positions_at_once


@torch.inference_mode()
def distributions(
    target: PreTrainedModel, samples: Sequence[Sample], layers: Sequence[int] = ()
) -> dict[str, torch.Tensor]:
    """Return the tensors of a shard of these samples, as described in `Shards`.

    The input streams of the ``layers``, concatenated, become ``states`` [P, layers * hidden] in
    bfloat16.
    """
    tensors: list[dict[str, torch.Tensor]] = [{} for _ in samples]
    kept = min(TOP, _vocabulary(target))
    lengths = [len(sample.tokens) for sample in samples]
    for numbers in _batches(lengths, positions_at_once(_vocabulary(target))):
        texts = [torch.tensor(samples[number].tokens) for number in numbers]
        rows = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(target.device)
        # Padding follows the text, so no position of the text attends to it.
        read: Any = target(input_ids=rows, use_cache=False, output_hidden_states=bool(layers))
        for row, number in enumerate(numbers):
            length = len(texts[row])
            best = read.logits[row, :length].float().log_softmax(-1).topk(kept)
            tensors[number] = {
                "tokens": texts[row].int(),
                "top_tokens": best.indices.int().cpu(),
                "top_log_probs": best.values.half().cpu(),
            }
            if layers:
                streams = [read.hidden_states[layer][row, :length] for layer in layers]
                tensors[number]["states"] = torch.cat(streams, -1).to(torch.bfloat16).cpu()
    whole = {name: torch.cat([each[name] for each in tensors]).contiguous() for name in tensors[0]}
    return whole | {"lengths": torch.tensor(lengths)}


def _vocabulary(target: PreTrainedModel) -> int:
    return int(target.config.get_text_config().vocab_size)


def _batches(lengths: Sequence[int], positions: int) -> list[list[int]]:
    """Return the numbers of texts that the target reads at once; they have similar lengths."""
    waiting = iter(sorted(range(len(lengths)), key=lambda number: -lengths[number]))
    batches = []
    while first := list(islice(waiting, 1)):
        more = max(1, positions // lengths[first[0]]) - 1
        batches.append([*first, *islice(waiting, more)])
    return batches
