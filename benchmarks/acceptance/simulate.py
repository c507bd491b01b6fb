"""Speculative decoding of many requests, step by step, and what it counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from transformers import PreTrainedModel

from benchmarks.acceptance.drafting import Grown, Pick, Requests, grow, of_trie
from benchmarks.acceptance.looking_up import LookUps
from benchmarks.acceptance.models import Decoder
from benchmarks.acceptance.pooled import DraftDecoder, PooledDecoder
from benchmarks.acceptance.texts import Prompts
from benchmarks.acceptance.verifying import Blocks, Verifier
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.token_tree import Accepted

Observe = Callable[[Grown, Accepted], None]


@dataclass
class Counts:
    """What was counted over all steps of all requests. Ratios are made where they are shown.

    ``tokens`` emitted (the bonus token of each step included), ``nodes`` in trees, draft
    ``forwards`` and nodes ``expanded`` in them. ``lengths`` [D + 1]: steps by accepted nodes.
    ``by_prompt`` [P, 2]: the steps of each prompt, and its tokens, averaged over what verification
    draws where its chances are known.
    """

    steps: int
    tokens: int
    nodes: int
    forwards: int
    expanded: int
    lengths: torch.Tensor
    by_prompt: torch.Tensor

    @classmethod
    def none(cls, depth: int) -> Counts:
        lengths, by_prompt = (torch.zeros(s, dtype=torch.float64) for s in ((depth + 1,), (0, 2)))
        return cls(0, 0, 0, 0, 0, lengths, by_prompt)

    def __iadd__(self, other: Counts) -> Self:
        for each in fields(self):
            mine, more = getattr(self, each.name), getattr(other, each.name)
            both = torch.cat([mine, more]) if each.name == "by_prompt" else mine + more
            setattr(self, each.name, both)
        return self

    @property
    def standard_error(self) -> float:
        """The standard error of `expected_tokens`, over prompts."""
        steps, tokens = self.by_prompt.T
        off = tokens - self.expected_tokens * steps
        return float((off**2).sum().sqrt() / steps.sum())

    @property
    def expected_tokens(self) -> float:
        """Tokens per step, averaged over what verification draws where its chances are known."""
        steps, tokens = self.by_prompt.sum(0).tolist()
        return float(tokens / steps)

    def add(
        self,
        grown: Grown,
        accepted: Accepted,
        on_path: torch.Tensor | None,
        prompts: torch.Tensor,
    ) -> None:
        """Count one step of the requests of ``prompts`` int64 [R]; ``on_path``: see `Verifier`."""
        tree = grown.tree
        self.steps += len(tree.counts)
        self.tokens += int((accepted.lengths + 1).sum())
        self.nodes += int(tree.counts.sum())
        self.forwards += int(grown.forwards.sum())
        self.expanded += int(grown.expanded.sum())
        tokens = 1 + (accepted.lengths if on_path is None else on_path.sum(1)).double()
        self.by_prompt[prompts.cpu()] += torch.stack([torch.ones_like(tokens), tokens], 1).cpu()
        self.lengths += torch.bincount(accepted.lengths, minlength=len(self.lengths)).cpu()


class _Sources:
    """The sources of candidates behind the texts of R requests: drafts, look-up, or both."""

    def __init__(
        self,
        plan: TreePlan,
        pick: Pick,
        drafts: Sequence[PreTrainedModel],
        lookups: LookUps | None,
        prompts: Prompts,
        longest: int,
    ) -> None:
        self._plan = plan
        self._pick = pick
        self._lookups = lookups
        self._drafts = len(drafts)
        self._decoder: DraftDecoder | None = None
        if len(drafts) == 1:
            self._decoder = Decoder(drafts[0], len(prompts), longest)
        elif drafts:
            self._decoder = PooledDecoder(drafts, len(prompts), longest)
        if self._decoder is not None:
            self._decoder.append(prompts.tokens, prompts.lengths)

    def keep(self, requests: torch.Tensor) -> None:
        for source in (self._decoder, self._lookups):
            if source is not None:
                source.keep(requests)

    def grow(self, fresh: torch.Tensor, sizes: torch.Tensor, requests: Requests) -> Grown:
        """Grow trees behind the first ``sizes[r]`` of the ``fresh`` tokens [R, E]."""
        trie = None
        if self._lookups is not None:
            self._lookups.append(fresh, sizes)
            trie = self._lookups.tries()
        if self._decoder is not None:
            logits = self._decoder.append(fresh, sizes)
            grown = grow(self._plan, self._pick, self._decoder, logits, requests, trie)
            count = self._drafts
            return replace(grown, forwards=count * grown.forwards, expanded=count * grown.expanded)
        if trie is None:
            raise ValueError("there is neither a draft nor look-up")
        return of_trie(self._plan, trie)


@torch.inference_mode()
def simulate(
    plan: TreePlan,
    pick: Pick,
    drafts: Sequence[PreTrainedModel],
    prompts: Prompts,
    verifier: Verifier,
    temperature: float,
    tokens: int,
    observe: Observe | None = None,
    lookups: LookUps | None = None,
) -> Counts:
    """Decode until every request has emitted ``tokens``, the one behind its prompt included.

    A step's tokens all count, those beyond ``tokens`` too: cutting the last step short would
    favour short trees. ``observe`` sees every step of every request. ``lookups``: look-up in the
    same prompts; without ``drafts`` it is the only source. Draft forwards and the nodes expanded
    in them are counted for each draft.
    """
    depth = plan.shape.max_depth
    counts = Counts.none(depth)
    counts.by_prompt = torch.zeros(len(prompts), 2, dtype=torch.float64)
    longest = prompts.longest + tokens + depth + 1
    sources = _Sources(plan, pick, drafts, lookups, prompts, longest)
    fresh, sizes = verifier.first()[:, None], torch.ones_like(prompts.lengths)
    emitted, seeds = sizes, prompts.seeds
    which = torch.arange(len(prompts), device=seeds.device)
    while True:
        going = (emitted < tokens).nonzero()[:, 0]
        if len(going) == 0:
            return counts
        if len(going) < len(emitted):
            sources.keep(going)
            verifier.keep(going)
            fresh, sizes, emitted, seeds, which = (
                x[going] for x in (fresh, sizes, emitted, seeds, which)
            )
        requests = Requests(seeds, temperature, of_roots=isinstance(verifier, Blocks))
        grown = sources.grow(fresh, sizes, requests)
        accepted = verifier.verify(grown)
        counts.add(grown, accepted, verifier.on_path, which)
        if observe is not None:
            observe(grown, accepted)
        fresh, sizes = accepted.tokens, accepted.lengths + 1
        emitted = emitted + sizes
