"""Verify a drawn chain as a block: its tokens are accepted together rather than one by one.

Source: Sun et al., "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444),
algorithm 2. Notation: p is the target's distribution after a prefix of the chain, q the draft's,
from which the next token of the chain was drawn. The ratio of a prefix is that of the
probabilities which p and q give it, cut at 1 after every token. The residual after a prefix of
ratio r is max(r p - q, 0), and m is its mass. A prefix passes with the chance m / (m + 1 - r), and
the whole chain with the chance r. The longest prefix that passes is accepted, and the token after
it is drawn from the residual, or from p after the whole chain.

Where a chain ends may depend on its tokens, but each end has to be decided before the token that
would follow is drawn: `tests/unit/tree/test_block.py` enumerates both cases. All noise comes from
the caller. No part of it may have been used before: what was rejected depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chances:
    """``passes`` [R, D]: the chance of each prefix of 1 to D tokens to pass, 0 beyond a chain's
    end. ``ratios`` [R, D + 1]: the ratio of each prefix of 0 to D tokens."""

    passes: torch.Tensor
    ratios: torch.Tensor

    def accepted(self, uniforms: torch.Tensor) -> torch.Tensor:
        """Return the length of the accepted prefix, int64 [R]; ``uniforms`` [R, D] in [0, 1)."""
        lengths = torch.arange(1, self.passes.shape[1] + 1, device=self.passes.device)
        longest: torch.Tensor = torch.where(uniforms < self.passes, lengths, 0).amax(dim=1)
        return longest


@dataclass(frozen=True)
class Chains:
    """R drawn chains of at most D tokens, and what is needed to verify them.

    ``tokens`` int64 [R, D], of which the first ``counts`` int64 [R] are verified. ``draft``
    [R, D, V]: q after the first 0 to D - 1 tokens. ``target`` [R, D + 1, V]: p after the first 0
    to D tokens. What stands after a chain's end has no meaning.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    draft: torch.Tensor
    target: torch.Tensor

    def chances(self) -> Chances:
        """Return the chances of every prefix."""
        depth = self.tokens.shape[1]
        token = self.tokens[:, :, None]
        # A drawn token has some chance under q.
        odds = (self.target[:, :depth].gather(2, token) / self.draft.gather(2, token))[:, :, 0]
        ratio = torch.ones_like(odds[:, 0])
        ratios = [ratio, *((ratio := (ratio * odd).clamp(max=1.0)) for odd in odds.unbind(1))]
        behind = torch.stack(ratios[1:], dim=1)
        mass = self._residual(behind[:, :-1], slice(1, depth)).sum(dim=2)
        whole = mass + 1 - behind[:, :-1]
        # Nothing is left where p = q, and then every prefix passes.
        passes = torch.where(whole == 0, 1.0, mass / whole)
        passes = torch.cat([passes, behind[:, -1:]], dim=1)
        place = torch.arange(1, depth + 1, device=token.device)
        passes = torch.where(place == self.counts[:, None], behind, passes)
        passes = torch.where(place <= self.counts[:, None], passes, 0.0)
        return Chances(passes, torch.stack(ratios, dim=1))

    def next_law(self, found: Chances, lengths: torch.Tensor) -> torch.Tensor:
        """Return the distribution of the token after the first ``lengths`` int64 [R] tokens.

        If rounding leaves nothing of the residual, it is p, so that no token of chance 0 is drawn.
        The result is [R, V].
        """
        request = torch.arange(len(lengths), device=lengths.device)
        p = self.target[request, lengths]
        q = self.draft[request, lengths.clamp(max=self.draft.shape[1] - 1)]
        rest = (found.ratios[request, lengths][:, None] * p - q).clamp(min=0)
        mass = rest.sum(dim=1, keepdim=True)
        return torch.where((lengths < self.counts)[:, None] & (mass > 0), rest / mass, p)

    def _residual(self, ratios: torch.Tensor, places: slice) -> torch.Tensor:
        """Return max(r p - q, 0) after the prefixes of these lengths, which have ``ratios``."""
        return (ratios[:, :, None] * self.target[:, places] - self.draft[:, places]).clamp(min=0)
