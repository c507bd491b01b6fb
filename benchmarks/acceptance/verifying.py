"""What a step accepts, at the price of the target's rows on the accepted path alone.

Verifying a tree in an engine runs the target over every node. Which nodes are accepted depends on
few of those rows, and the target's output at a node depends on its path alone, so the laboratory
gets the same numbers from less:

- With the rule ``match``, and with any rule at temperature 0, the emitted text does not depend on
  the tree. `Replay` takes the text that the target has written once and for all, and accepts as
  much of it as lies in the tree.
- The sampled rules decide at one node after another. `Walk` runs the target on the nodes it comes
  to, one decode for each level and all requests.
- A drawn chain is accepted as a whole. `Blocks` runs the target on all of its nodes at once.
"""

from __future__ import annotations

from typing import Protocol

import torch
from transformers import PreTrainedModel

from benchmarks.acceptance.drafting import Grown
from benchmarks.acceptance.models import Decoder
from benchmarks.acceptance.texts import Prompts
from benchmarks.acceptance.traversal import traverse
from dyntree_kernels.ancestors import ancestor_bits
from dyntree_plugin.tree.noise import ACCEPT, BONUS, stream, uniform
from dyntree_plugin.tree.papers.drawn import DrawnRule, draw
from dyntree_plugin.tree.perturb import perturb_on
from dyntree_plugin.tree.token_tree import Accepted, TokenTree


class Verifier(Protocol):
    """The target's side of R requests.

    ``on_path`` [R, N] are the chances of the last trees' nodes to be on the accepted path, None
    where these are not computed.
    """

    on_path: torch.Tensor | None

    def first(self) -> torch.Tensor:
        """The token that the target emits behind each prompt, int64 [R]: the first root."""

    def verify(self, grown: Grown) -> Accepted:
        """What is accepted of each request's tree, and the token that the target adds."""

    def keep(self, requests: torch.Tensor) -> None:
        """Go on with ``requests`` alone, indices of the present ones in ascending order."""


class Replay:
    """Accepts what a text that is known already has in common with the tree."""

    def __init__(self, text: torch.Tensor) -> None:
        """``text`` int64 [R, T]: what the target writes; a step looks as deep as its tree."""
        self.on_path: torch.Tensor | None = None
        self._text = text
        self._next = torch.ones_like(text[:, 0])

    def first(self) -> torch.Tensor:
        return self._text[:, 0]

    def verify(self, grown: Grown) -> Accepted:
        tree = grown.tree
        depth = int(tree.depths.max())
        ahead = torch.arange(depth + 1, device=tree.tokens.device)
        # Behind the end of the text nothing is accepted.
        wanted = torch.nn.functional.pad(self._text, (0, depth + 1), value=-1)
        wanted = wanted.gather(1, self._next[:, None] + ahead)
        path = _follow(tree.parents, tree.tokens, tree.counts, wanted[:, :depth])
        lengths = (path >= 0).sum(1)
        self._next = self._next + lengths + 1
        return Accepted(path, lengths, wanted)

    def keep(self, requests: torch.Tensor) -> None:
        self._text, self._next = self._text[requests], self._next[requests]


def _follow(
    parents: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """The path that spells ``wanted`` [R, D]: nodes int64 [R, D], -1 behind the last."""
    real = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
    at = torch.full_like(counts, -1)
    path = []
    for token in wanted.unbind(1):
        # -2 is no node's parent.
        found = real & (parents == at[:, None]) & (tokens == token[:, None])
        at = torch.where(found.any(1), found.int().argmax(1), -2)
        path.append(at.clamp(min=-1))
    return torch.stack(path, 1)


class _Target:
    """The target's distributions behind the contexts of R requests, and the noise that decides."""

    def __init__(
        self, model: PreTrainedModel, prompts: Prompts, temperature: float, positions: int
    ) -> None:
        """``positions``: the longest context there will be."""
        self.decoder = Decoder(model, len(prompts), positions)
        self._temperature = temperature
        self._seeds = prompts.seeds
        self._perturb = perturb_on(self.decoder.device)
        self._prompts = prompts

    def first(self) -> torch.Tensor:
        """Read the prompts, and draw the token behind each, int64 [R]."""
        prompts = self._prompts
        law = self.law(self.decoder.append(prompts.tokens, prompts.lengths))
        return draw(law, self.gumbel(BONUS, prompts.lengths - 1, law.shape[1]))

    def keep(self, requests: torch.Tensor) -> None:
        self.decoder.keep(requests)
        self._seeds = self._seeds[requests]

    def law(self, logits: torch.Tensor) -> torch.Tensor:
        return (logits / self._temperature).softmax(1)

    def gumbel(
        self,
        purpose: int,
        positions: torch.Tensor,
        width: int,
        at: torch.Tensor | slice = slice(None),
    ) -> torch.Tensor:
        """Noise [M, width] of the ``positions`` int64 [M] for decisions of the requests ``at``."""
        seeds = stream(self._seeds[at], purpose)
        ones = torch.ones(len(seeds), device=seeds.device)
        zeros = torch.zeros(len(seeds), width, device=seeds.device)
        return self._perturb(zeros, ones, seeds, positions)


class Walk:
    """Follows a sampled rule down the tree with the target's distributions along the way."""

    def __init__(
        self,
        target: PreTrainedModel,
        prompts: Prompts,
        rule: DrawnRule,
        temperature: float,
        positions: int,
    ) -> None:
        """``positions``: the longest context there will be."""
        self._target = _Target(target, prompts, temperature, positions)
        self._decoder = self._target.decoder
        self._rule = rule
        self.on_path: torch.Tensor | None = None
        self._root = self._target.first()

    def first(self) -> torch.Tensor:
        return self._root

    def keep(self, requests: torch.Tensor) -> None:
        self._target.keep(requests)
        self._root = self._root[requests]

    @torch.inference_mode()
    def verify(self, grown: Grown) -> Accepted:
        tree, draws, laws = grown.tree, grown.tree.draws, grown.laws
        if draws is None or laws is None:
            raise ValueError("a sampled rule needs trees of drawn children")
        requests = torch.arange(len(self._root), device=self._decoder.device)
        at = torch.full_like(requests, -1)
        token = self._root
        path, emitted = [], []
        walking = requests
        while len(walking):
            here = torch.isin(requests, walking).long()
            law = self._target.law(self._decoder.read(token[:, None], here))
            nodes = draws.nodes[walking, at[walking] + 1]
            nodes = nodes[:, : int((nodes >= 0).sum(1).max().clamp(min=1))]
            row = laws.rows[walking, draws.columns[walking, at[walking] + 1]]
            decision = self._rule.decide(
                law,
                laws.log_probs[row],
                tree.tokens[walking].gather(1, nodes.clamp(min=0)),
                nodes,
                uniform(self._gumbel(ACCEPT, walking, nodes.shape[1])),
                self._gumbel(BONUS, walking, law.shape[1]),
            )
            at = torch.full_like(at, -1).index_put((walking,), decision.node)
            token = torch.zeros_like(token).index_put((walking,), decision.token)
            self._root = self._root.index_put((walking,), decision.token)
            path.append(at)
            emitted.append(token)
            walking = walking[decision.node >= 0]
        steps = torch.stack(path, 1)
        return Accepted(steps[:, :-1], (steps >= 0).sum(1), torch.stack(emitted, 1))

    def _gumbel(self, purpose: int, at: torch.Tensor, width: int) -> torch.Tensor:
        """Noise [M, width] for decisions behind the last tokens of the requests ``at``."""
        return self._target.gumbel(purpose, self._decoder.lengths[at] - 1, width, at)


class Blocks:
    """Accepts drawn chains as blocks, with noise of the root's position, which no later step uses
    again. Chains must be drawn with such noise, too."""

    def __init__(
        self, target: PreTrainedModel, prompts: Prompts, temperature: float, positions: int
    ) -> None:
        """``positions``: the longest context there will be."""
        self._target = _Target(target, prompts, temperature, positions)
        self._decoder = self._target.decoder
        self._fresh = self._target.first()[:, None]
        self._sizes = torch.ones_like(prompts.lengths)
        self.on_path: torch.Tensor | None = None

    def first(self) -> torch.Tensor:
        return self._fresh[:, 0]

    def keep(self, requests: torch.Tensor) -> None:
        self._target.keep(requests)
        self._fresh, self._sizes = self._fresh[requests], self._sizes[requests]

    @torch.inference_mode()
    def verify(self, grown: Grown) -> Accepted:
        tree, laws = grown.tree, grown.laws
        if tree.draws is None or laws is None:
            raise ValueError("a block needs drawn tokens")
        target = self._laws_after(tree)
        rows = laws.rows.gather(1, tree.draws.columns)
        found = traverse(tree.tokens, tree.parents, tree.counts, laws.log_probs[rows], target)
        self.on_path = found.on_path()
        roots = self._decoder.lengths - 1
        last = found.accepted(uniform(self._target.gumbel(ACCEPT, roots, target.shape[1])))
        path = found.path_to(last, int(tree.depths.max()))
        lengths = (path >= 0).sum(1)
        law = found.residual[torch.arange(len(last), device=last.device), last]
        bonus = draw(law, self._target.gumbel(BONUS, roots, law.shape[1]))
        emitted = torch.nn.functional.pad(tree.tokens.gather(1, path.clamp(min=0)), (0, 1))
        self._fresh = emitted.scatter(1, lengths[:, None], bonus[:, None])
        self._sizes = lengths + 1
        return Accepted(path, lengths, self._fresh)

    def _laws_after(self, tree: TokenTree) -> torch.Tensor:
        """Return the target's distributions after the root and every node, [R, N + 1, V]."""
        root = self._target.law(self._decoder.append(self._fresh, self._sizes))
        size = tree.tokens.shape[1]
        valid = torch.arange(size, device=root.device) < tree.counts[:, None]
        branches = self._decoder.branches(size, int(tree.depths.max()))
        ancestors = ancestor_bits(tree.parents)
        nodes = branches.extend(tree.tokens, tree.depths, ancestors, valid)
        laws = root[:, None].repeat(1, size + 1, 1)
        laws[:, 1:][valid] = self._target.law(nodes)
        return laws
