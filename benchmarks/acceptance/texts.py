"""The prompts, what the target writes behind them, and what a model foretells there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from benchmarks.acceptance.models import Decoder
from dyntree_plugin.tree.perturb import perturb_on


@dataclass(frozen=True)
class Prompts:
    """R prompts: ``tokens`` int64 [R, P], the first ``lengths`` int64 [R] of them real; ``seeds``
    int64 [R] key the target sampler's noise."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    seeds: torch.Tensor

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], seed: int, device: torch.device) -> Prompts:
        """Token ids of at least one token each. Prompt i has the seed ``seed + i``."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        seeds = torch.arange(seed, seed + len(prompts))
        return cls(tokens.to(device), lengths.to(device), seeds.to(device))

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def part(self, rows: slice) -> Prompts:
        return Prompts(self.tokens[rows], self.lengths[rows], self.seeds[rows])

    @property
    def longest(self) -> int:
        return self.tokens.shape[1]


@torch.inference_mode()
def write(
    target: PreTrainedModel, prompts: Prompts, temperature: float, count: int
) -> torch.Tensor:
    """``count`` tokens of the target's own behind each prompt, int64 [R, count].

    The token at a position is the largest of logits / temperature + noise of (seed, position), so
    the text is what speculative decoding with the rule ``match`` emits, whatever it drafts. It
    goes on behind an end-of-text token.
    """
    decoder = Decoder(target, len(prompts), prompts.longest + count)
    perturb = perturb_on(decoder.device)
    temperatures = torch.full((len(prompts),), temperature, device=decoder.device)
    fresh, sizes = prompts.tokens, prompts.lengths
    written = []
    for _ in range(count):
        logits = decoder.append(fresh, sizes)
        scores = perturb(logits, temperatures, prompts.seeds, decoder.lengths - 1)
        written.append(scores.argmax(1))
        fresh, sizes = written[-1][:, None], torch.ones_like(sizes)
    return torch.stack(written, 1)


@torch.inference_mode()
def logits_along(model: PreTrainedModel, prompts: Prompts, text: torch.Tensor) -> torch.Tensor:
    """Return a model's logits [R x T, V] for each token of ``text`` [R, T] behind the prompts."""
    requests, length = text.shape
    decoder = Decoder(model, requests, prompts.longest + length)
    first = decoder.append(prompts.tokens, prompts.lengths)
    rest = decoder.read(text[:, :-1], torch.full_like(prompts.lengths, length - 1))
    return torch.cat([first[:, None], rest.view(requests, length - 1, -1)], 1).flatten(0, 1)
