"""The candidates of one step, and the trees that are cut from them."""

from __future__ import annotations

import torch

from dyntree_plugin.tree.growth.base import Frontier
from dyntree_plugin.tree.token_tree import NO_VALUE, Draws, TokenTree


class CandidatePool:
    """K candidate children below the root and below every expanded node of R requests.

    Expansion 0 is the root's, and expansion 1 + c that of the node in scratch column c. With
    several ``roots`` that many expansions are the root's, and those of nodes follow. Candidate
    ``e * K + k`` is the k-th child of expansion e. So candidates come after their parents.
    ``values`` float32 [R, candidates] are the logs of their paths' estimated acceptance.
    """

    def __init__(
        self,
        num_requests: int,
        children: int,
        widths: tuple[int, ...],
        columns: torch.Tensor,
        roots: int = 1,
    ) -> None:
        """``columns`` int64 [R] is the number of scratch columns that each request has room for.
        ``roots``: how many times the root is expanded."""
        device = columns.device
        self._roots = roots
        self.children = children
        self._widths = widths
        scratch = sum(widths)
        self._scratch_columns = torch.arange(scratch, device=device)
        self._has_room = self._scratch_columns < columns[:, None]
        self._own_bits = _own_bits(self._scratch_columns)

        self._capacity = children * (roots + scratch)
        self.values = torch.full((num_requests, self._capacity), NO_VALUE, device=device)
        self.tokens = torch.zeros_like(self.values, dtype=torch.int64)
        self._distributions: torch.Tensor | None = None
        # For every expansion: the candidate that it expands (the root: one past the last), its
        # depth, its value if it could be expanded, and its ancestors.
        self._nodes = torch.full(
            (num_requests, roots + scratch), self._capacity, dtype=torch.int64, device=device
        )
        self._depths = torch.zeros_like(self._nodes)
        self.bases = torch.zeros(num_requests, roots + scratch, device=device)
        self._bits = torch.zeros(
            num_requests, roots + scratch, self._own_bits.shape[1], dtype=torch.int32, device=device
        )
        self._forward = 0
        self._added = 0
        self._expanded = roots

    @property
    def new(self) -> slice:
        """The expansions whose children the next ``add`` brings."""
        return slice(self._added, self._expanded)

    @property
    def size(self) -> int:
        """The number of candidates so far."""
        return self._added * self.children

    def by_expansion(self, candidates: torch.Tensor) -> torch.Tensor:
        """View [R, candidates] as [R, expansions, K]."""
        return candidates.view(candidates.shape[0], -1, self.children)

    def add(
        self,
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
        distributions: torch.Tensor | None = None,
    ) -> None:
        """Add the children of the last expansions; see `Growth.add`.

        Raises:
            ValueError: if this is not one set of children for every expansion.
        """
        new = self.new
        expected = (self.values.shape[0], self._expanded - self._added, self.children)
        if tokens.shape != expected or log_probs.shape != expected:
            raise ValueError(
                f"tokens {tuple(tokens.shape)} and log_probs {tuple(log_probs.shape)} must be "
                f"[requests, width, children] = {list(expected)}"
            )
        self.by_expansion(self.tokens)[:, new] = tokens
        bases = self.bases[:, new, None]
        torch.add(bases, log_probs, out=self.by_expansion(self.values)[:, new])
        self._keep_distributions(distributions)
        self._added = self._expanded

    def expand(self, nodes: torch.Tensor, worthwhile: torch.Tensor) -> Frontier:
        """Make candidates ``nodes`` int64 [R, width] the next draft forward's frontier.

        Those that are not ``worthwhile`` bool [R, width], or find no room, fill it up unused.
        """
        now = slice(self._expanded, self._expanded + nodes.shape[1])
        columns = slice(now.start - self._roots, now.stop - self._roots)
        self._expanded = now.stop
        self._forward += 1
        valid = worthwhile & self._has_room[:, columns]
        above = self._above(nodes)

        depths = self._depths.gather(1, above) + 1
        words = above[:, :, None].expand(-1, -1, self._bits.shape[2])
        bits = self._bits.gather(1, words) | self._own_bits[columns]
        bits.masked_fill_(~valid[:, :, None], 0)
        self._nodes[:, now] = nodes
        self._depths[:, now] = depths
        self._bits[:, now] = bits
        self.bases[:, now] = self.values.gather(1, nodes).masked_fill_(~valid, NO_VALUE)
        above = torch.where(valid, above, 0)
        return Frontier(self.tokens.gather(1, nodes), depths, bits, valid, above)

    @property
    def width(self) -> int:
        """The number of nodes of the next frontier.

        Raises:
            ValueError: if the step has no further draft forward, or children are missing.
        """
        if self._forward == len(self._widths) or self._added < self._expanded:
            raise ValueError(
                f"frontier() after {self._forward} of {len(self._widths)} expansions and "
                f"{self._added} of {self._expanded} additions"
            )
        return self._widths[self._forward]

    def tree(
        self, ranks: torch.Tensor, node_budget: int, named: torch.Tensor | None = None
    ) -> TokenTree:
        """Return the ``node_budget`` candidates of highest rank, highest first; ``-inf`` is none.

        Ranks float32 [R, candidates] must not rise from parent to child. The sort is stable and
        candidates come after their parents, so equal ranks keep parents first. ``named`` int64
        [R, expansions, K] is the draw of the same expansion whose candidate is a draw's node; if
        left out, it is the draw itself.
        """
        ranks, order = ranks.sort(dim=1, descending=True, stable=True)
        exists = ranks > NO_VALUE
        kept = exists[:, :node_budget]
        keep = order[:, :node_budget]
        positions = torch.arange(kept.shape[1], device=order.device)
        # The node that a candidate became; -1 for none, and for the root.
        became = order.new_full((order.shape[0], order.shape[1] + 1), -1)
        became.scatter_(1, keep, torch.where(kept, positions, -1))
        above = self._above(keep)
        depths = self._depths.gather(1, above) + 1
        parents = became.gather(1, self._nodes.gather(1, above)).masked_fill_(~kept, -1)
        depths = depths.masked_fill_(~kept, 1)
        tokens = self.tokens.gather(1, keep).masked_fill_(~kept, 0)
        candidates = keep.masked_fill(~kept, 0)
        values = self.values.gather(1, keep).masked_fill_(~kept, NO_VALUE)
        pad = node_budget - kept.shape[1]
        if pad > 0:
            tokens = torch.nn.functional.pad(tokens, (0, pad))
            parents = torch.nn.functional.pad(parents, (0, pad), value=-1)
            depths = torch.nn.functional.pad(depths, (0, pad), value=1)
            values = torch.nn.functional.pad(values, (0, pad), value=NO_VALUE)
            candidates = torch.nn.functional.pad(candidates, (0, pad))
        draws = self._draws(became, named, node_budget)
        counts, grown = kept.sum(dim=1), exists.sum(dim=1)
        return TokenTree(tokens, parents, depths, values, counts, draws, grown, candidates)

    def _draws(
        self, became: torch.Tensor, named: torch.Tensor | None, node_budget: int
    ) -> Draws | None:
        if self._distributions is None:
            return None
        num_requests, expansions = self._nodes.shape
        drawn = self.by_expansion(became[:, :-1])
        if named is not None:
            drawn = drawn.gather(2, named)
        # Draws below node j go to row j + 1. What was not expanded, or whose node was cut, has
        # none; it goes to a row past the last.
        rows = became.gather(1, self._nodes) + 1
        rows[:, 1:].masked_fill_((rows[:, 1:] == 0) | (self.bases[:, 1:] == NO_VALUE), -1)
        rows = torch.where(rows < 0, node_budget + 1, rows)
        shape = (num_requests, node_budget + 2, self.children)
        nodes = torch.full(shape, -1, dtype=torch.int64, device=became.device)
        nodes.scatter_(1, rows[:, :, None].expand_as(drawn), drawn)
        columns = torch.zeros(shape[:2], dtype=torch.int64, device=became.device)
        columns.scatter_(1, rows, torch.arange(expansions, device=rows.device).expand_as(rows))
        return Draws(nodes[:, :-1], columns[:, :-1], self._distributions)

    def _above(self, candidates: torch.Tensor) -> torch.Tensor:
        """Return the expansion above each candidate."""
        return candidates // self.children

    def _keep_distributions(self, distributions: torch.Tensor | None) -> None:
        if (distributions is None) != (self._distributions is None) and self._added > 0:
            raise ValueError("distributions must be given with every add, or with none")
        if distributions is None:
            return
        if self._distributions is None:
            shape = (*self.bases.shape, distributions.shape[-1])
            self._distributions = distributions.new_empty(shape)
        self._distributions[:, self.new] = distributions


def _own_bits(columns: torch.Tensor) -> torch.Tensor:
    """Return the bit of each of ``columns`` = 0, 1, …: int32 [columns, words], little endian."""
    words = torch.arange(max(1, -(-columns.shape[0] // 32)), device=columns.device)
    bit = torch.ones_like(columns) << (columns % 32)
    return torch.where(columns[:, None] // 32 == words, bit[:, None], 0).to(torch.int32)
