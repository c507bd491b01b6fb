"""How good the target is on the held-out modules, and how well the draft follows it there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.pair.block import Block
from benchmarks.pair.models import continue_rows
from benchmarks.pair.train import token_stream
from dyntree_plugin.tune.eagle import Head, read_target


@dataclass(frozen=True)
class HeldOutLoss:
    nats_per_token: float
    bits_per_byte: float


@dataclass(frozen=True)
class Agreement:
    """Of the draft with the target, on continuations that the target wrote.

    `top1` is the share of greedy tokens that are the draft's first choice too. `chain_accepted`
    is the mean number of draft tokens accepted per step by greedy decoding with chains of
    `chain` tokens; a step emits one more. `total_variation` is the mean distance between the two
    distributions along text sampled at temperature 1.
    """

    top1: float
    chain: int
    chain_accepted: float
    total_variation: float


@dataclass(frozen=True)
class HeadAgreement:
    """Of a head or a block draft with the target, on greedy continuations that the target wrote.

    `top1_by_step` are the shares of greedy tokens that are the draft's first choice as the first,
    second, ... token of a chain, behind the same text. `in_vocabulary` is the share of those that
    the draft can draft at all. `chain_accepted` is that of `Agreement`.
    """

    top1_by_step: tuple[float, ...]
    in_vocabulary: float
    chain: int
    chain_accepted: float


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


@torch.no_grad()
def agreement(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    *,
    tokens: int = 64,
    chain: int = 4,
    seed: int = 0,
) -> Agreement:
    """Compare the pair on `tokens` continuations of each prompt, greedy and sampled."""
    generator = torch.Generator().manual_seed(seed)
    matches: list[list[bool]] = []
    distance = 0.0
    for prompt in prompts:
        ids = torch.tensor(tokenizer(prompt)["input_ids"]).repeat(2, 1)
        start = ids.shape[1]
        temperature = torch.tensor([[0.0], [1.0]])
        rows = continue_rows(target, ids, start + tokens, temperature, generator)
        wanted, given = (
            model(input_ids=rows, use_cache=False).logits[:, start - 1 : -1].float()
            for model in (target, draft)
        )
        matches.append((given[0].argmax(-1) == rows[0, start:]).tolist())
        distance += float((wanted[1].softmax(-1) - given[1].softmax(-1)).abs().sum(-1).mean()) / 2
    hits = sum(map(sum, matches))
    steps = sum(chain_steps(match, chain) for match in matches)
    total = len(prompts) * tokens
    return Agreement(hits / total, chain, (total - steps) / steps, distance / len(prompts))


@torch.no_grad()
def head_agreement(
    target: LlamaForCausalLM,
    head: Head,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    *,
    tokens: int = 64,
    chain: int = 4,
    steps: int = 6,
) -> HeadAgreement:
    """Compare the two on `tokens` that the target writes greedily behind each prompt.

    Each prompt must have more than `steps` tokens.
    """
    hits = torch.zeros(steps)
    known = taken = 0
    for prompt in prompts:
        ids = torch.tensor(tokenizer(prompt)["input_ids"])[None]
        start = ids.shape[1]
        row = continue_rows(target, ids, start + tokens, torch.zeros(1, 1), torch.Generator())
        states, embedded, _ = read_target(target, row, head.layers)
        text = row[0, start:]
        # Row B of step k drafts the token at B + k + 1.
        match = torch.stack(
            [
                head.tokens[logits[0, start - step - 1 : -1].argmax(-1)] == text
                for step, logits in enumerate(head.unrolled(states, embedded, steps), 1)
            ]
        )
        hits += match.sum(-1)
        known += int(head.t2d[text].sum())
        taken += steps_of_chains(match[:chain].tolist())
    total = len(prompts) * tokens
    by_step = tuple((hits / total).tolist())
    return HeadAgreement(by_step, known / total, chain, (total - taken) / taken)


@torch.no_grad()
def block_agreement(
    target: LlamaForCausalLM,
    block: Block,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    *,
    tokens: int = 64,
    chain: int = 4,
) -> HeadAgreement:
    """Do as `head_agreement` with a block draft, whose steps are the positions of its block."""
    length = block.config.block_size - 1
    hits = torch.zeros(length)
    taken = 0
    for prompt in prompts:
        ids = torch.tensor(tokenizer(prompt)["input_ids"])[None]
        start = ids.shape[1]
        row = continue_rows(target, ids, start + tokens, torch.zeros(1, 1), torch.Generator())
        states, _, _ = read_target(target, row, block.streams)
        roots = torch.arange(start - length, start + tokens - 1)
        best = block(states, row, roots)[0].argmax(-1)
        text = row[0, start:]
        # The token after a root by k + 1 is that of position k of its block.
        firsts = [length - 1 - k for k in range(length)]
        match = torch.stack(
            [best[first : first + tokens, k] == text for k, first in enumerate(firsts)]
        )
        hits += match.sum(-1)
        taken += steps_of_chains(match[:chain].tolist())
    total = len(prompts) * tokens
    return HeadAgreement(tuple((hits / total).tolist()), 1.0, chain, (total - taken) / taken)


def chain_steps(match: Sequence[bool], chain: int) -> int:
    """Target steps for a text of which `match` says where the draft's first choice was right.

    A greedy chain is accepted up to its first miss, and up to there it is the text itself.
    """
    return steps_of_chains([match] * chain)


def steps_of_chains(match: Sequence[Sequence[bool]]) -> int:
    """Target steps for a text, of chains with as many tokens as `match` has lists.

    The n-th list says where the n-th token of a chain that starts there was right.
    """
    steps = position = 0
    while position < len(match[0]):
        accepted = 0
        while (
            accepted < len(match)
            and position + accepted < len(match[0])
            and match[accepted][position + accepted]
        ):
            accepted += 1
        position += accepted + 1
        steps += 1
    return steps
