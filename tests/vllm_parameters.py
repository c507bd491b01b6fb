"""Kernels that read paths, and vLLM's that read the rows before, on the same rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from path_checks import DEPTH, VOCABULARY, Batch, batch_of, penalties_of, texts_of
from vllm.v1.worker.gpu.sample.bad_words import apply_bad_words
from vllm.v1.worker.gpu.sample.penalties import apply_penalties
from vllm.v1.worker.gpu.sample.thinking_budget import apply_thinking_budget

from dyntree_kernels.paths import BadWords, PathKernels, Paths, Penalties, Texts, Thoughts

SLOTS, WORDS = 6, 8

Both = tuple[torch.Tensor, torch.Tensor]


class Device(NamedTuple):
    """A device with its kernels."""

    name: torch.device
    kernels: PathKernels

    def put(self, arrays: Any) -> Any:
        """Copy the tensors of a named tuple there."""
        return type(arrays)(*(each.to(self.name) for each in arrays))

    def batch(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Paths]:
        """Return the slots, tokens, local places and paths of the batch's rows."""
        parents, slots, local, ids = (each.to(self.name) for each in batch[:4])
        return slots, ids, local, self.kernels.paths_of(parents, slots, local, ids, DEPTH)


def penalize(on: Device, batch: Batch, g: torch.Generator) -> Both:
    penalties: Penalties = on.put(penalties_of(g, 3000))
    slots, ids, local, paths = on.batch(batch)
    own = (torch.randn(len(slots), 3000, generator=g) * 3).to(on.name)
    stock = own.clone()
    on.kernels.penalize(own, slots, paths, penalties)
    apply_penalties(stock, slots, ids, local, *penalties)
    return own, stock


def mask(on: Device, batch: Batch, g: torch.Generator) -> Both:
    texts: Texts = on.put(texts_of(g))
    slots, ids, local, paths = on.batch(batch)
    lengths = torch.randint(1, 4, (SLOTS, WORDS), generator=g)
    offsets = torch.nn.functional.pad(lengths.cumsum(1), (1, 0)).int()
    tokens = torch.randint(VOCABULARY, (SLOTS, 4 * WORDS), generator=g).int()
    counts = torch.tensor([1, 4, WORDS, 0, 2, 3]).int()
    words: BadWords = on.put(BadWords(tokens, offsets, counts))
    own, stock = torch.zeros(2, len(slots), VOCABULARY, device=on.name)
    on.kernels.mask_bad_words(own, slots, paths, words, texts, WORDS)
    apply_bad_words(stock, slots, *words, *texts, ids, local, WORDS)
    return own, stock


def force(on: Device, batch: Batch, g: torch.Generator) -> Both:
    texts: Texts = on.put(texts_of(g))
    slots, ids, local, paths = on.batch(batch)
    markers = (torch.tensor(each).int() for each in ([1], [2], [2, 3]))
    budgets, last = torch.tensor([0, 1, 2, -1, 0, 1]).int(), torch.full((2, SLOTS), -1).int()
    thoughts: Thoughts = on.put(Thoughts(budgets, *last, *markers))
    own, stock = torch.zeros(2, len(slots), VOCABULARY, device=on.name)
    # vLLM's call looks for the markers in the committed tokens, too.
    apply_thinking_budget(
        stock, slots.unique(), slots, thoughts.budgets, texts.token_ids, texts.total_lens, ids,
        local, *thoughts[1:3], torch.zeros(SLOTS, dtype=torch.int32, device=on.name),
        *thoughts[3:],
    )  # fmt: skip
    on.kernels.force_thought_end(own, slots, paths, thoughts, texts)
    return own, stock


def both(on: Device, apply: Callable[..., Both], seed: int, *, chains: bool) -> Both:
    """Return the logits of our kernel and of vLLM's, for trees or for chains."""
    g = torch.Generator().manual_seed(seed)
    own, stock = apply(on, batch_of(g, [11, 0, 4, 7], 11, chains=chains), g)
    assert own.unique().numel() > 1
    return own, stock


APPLIED = (penalize, mask, force)
