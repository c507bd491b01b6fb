"""What is known of a trie's nodes in one step: by the trie itself, and by the draft's judgement."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from dyntree_kernels.contracts import BESIDE, BOTH, DRAFT, LOOK_UP
from dyntree_kernels.tries import Trie
from dyntree_plugin.tree.value import MAX_FEATURE, AcceptanceEstimate, logit_of


class Asked(NamedTuple):
    """Tokens whose chance the draft is asked for, int64 [R, T] both.

    ``rows``: the row of logits of each, -1 for none.
    """

    rows: torch.Tensor
    tokens: torch.Tensor

    def any_in(self, rows: int) -> torch.Tensor:
        """Return in which of so many rows any token is asked for, bool [rows]."""
        at = torch.where(self.rows < 0, rows, self.rows).flatten()
        found = torch.zeros(rows + 1, dtype=torch.bool, device=at.device)
        return found.index_fill_(0, at, True)[:rows]


class Judgement(Protocol):
    """What the draft says in the rows of R requests; `tree.children.Children` explains the parts.

    ``tokens`` int64 [R, W, K], ``asked`` float32 [R, T], ``beside`` bool [R, W].
    """

    @property
    def tokens(self) -> torch.Tensor: ...
    @property
    def asked(self) -> torch.Tensor | None: ...
    @property
    def beside(self) -> torch.Tensor | None: ...


class JudgedTrie:
    """Features, kinds and chances of the T nodes of a trie, for each of R requests.

    A node that the draft has not judged has the trie's evidence, and the noise of the target's
    sampler. One that it has judged has the draft's logit, which contains the noise, and the
    evidence.
    """

    def __init__(
        self,
        trie: Trie,
        noise: torch.Tensor,
        classes: torch.Tensor,
        estimate: AcceptanceEstimate | None,
    ) -> None:
        """``noise`` float32 [R, T] is the target sampler's at each node, 0 where it has none.
        ``classes`` int64 [R]. ``estimate`` is None if values are not learned."""
        self.trie = trie
        self._classes = classes
        self._estimate = estimate
        self._evidence = trie.evidence.clamp(-MAX_FEATURE, MAX_FEATURE)
        self.features = torch.stack([self._evidence, noise], dim=-1)
        """float32 [R, T, FEATURES]."""
        self.kinds = torch.full_like(trie.tokens, LOOK_UP, dtype=torch.int8)
        """int8 [R, T]."""
        self._drafts: list[torch.Tensor] = []

    @property
    def log_chances(self) -> torch.Tensor:
        """The log of the chance that the target takes each node, float32 [R, T]."""
        if self._estimate is None:
            return torch.nn.functional.logsigmoid(self.features[..., 0])
        return self._estimate.log_chance(self.features, self._classes, self.kinds)

    @property
    def candidate_kinds(self) -> torch.Tensor:
        """The kinds of all candidates so far: the trie's nodes, then the draft's; int8 [R, C]."""
        return torch.cat([self.kinds, *self._drafts], dim=1)

    def judge(self, found: Judgement) -> torch.Tensor:
        """Take over what the draft says.

        Return the log chances of the nodes that it judged, NaN for the others; float32 [R, T].
        """
        log_probs, beside = found.asked, found.beside
        if log_probs is None or beside is None:
            raise ValueError("the draft must be asked for the trie's nodes")
        kinds = torch.where(beside, BESIDE, DRAFT).to(torch.int8)
        self._drafts.append(kinds[:, :, None].expand(found.tokens.shape).flatten(1))
        told = ~log_probs.isnan()
        both = torch.stack([logit_of(log_probs), self._evidence], dim=-1)
        self.features = torch.where(told[..., None], both, self.features)
        self.kinds = torch.where(told, BOTH, self.kinds).to(torch.int8)
        return self.log_chances.masked_fill(~told, torch.nan)
