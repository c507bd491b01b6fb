"""Growth `topk` in plain Python, a request at a time: the oracle of the kernels on every device.

A node is a path of tokens. Its value is its parent's plus the log of its edge's chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch

from dyntree_kernels.ancestors import ancestor_bits as ancestor_bits_of
from dyntree_kernels.contracts import BESIDE, BOTH, DRAFT, KINDS, LOOK_UP, GrowthSettings
from dyntree_kernels.cpu.gumbel import perturbed_logits
from dyntree_kernels.tries import Trie
from dyntree_plugin.tree.children import only_first, temperature_scaled
from dyntree_plugin.tree.value import MAX_FEATURE, features, logit_of

NONE = -math.inf
PAD_SLOT = -1


@dataclass(eq=False)
class Node:
    """A candidate. ``chance`` is the log of its edge's, ``expansion`` its own one, -1 for none."""

    token: int
    above: Node | None
    chance: float
    kind: int
    features: torch.Tensor
    expansion: int = -1
    value: float = field(init=False)
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        self.depth = 1 + (self.above.depth if self.above else 0)
        self.revalue()

    def revalue(self) -> None:
        above = self.above.value if self.above else 0.0
        self.value = float(np.float32(above) + np.float32(self.chance))

    @property
    def path(self) -> list[Node]:
        """The nodes from the root down to this one."""
        return [*(self.above.path if self.above else []), self]


@dataclass
class Request:
    """A request of a step. ``trie`` and ``drafted`` are its candidates, ``rows`` the nodes of the
    last forward, None for the root and for rows without a node."""

    number: int
    root: int
    temperature: torch.Tensor
    row: int
    seed: torch.Tensor
    chained: bool
    levels: int
    slot: int
    trie: list[Node] = field(default_factory=list)
    drafted: list[Node] = field(default_factory=list)
    rows: list[Node | None] = field(default_factory=lambda: [None])

    @property
    def candidates(self) -> list[Node]:
        return [*self.trie, *self.drafted]


class BestFirst:
    """A `StepGrowth`."""

    resumable = False

    def __init__(self, settings: GrowthSettings) -> None:
        self.settings = settings
        self._least = math.log(settings.least) if settings.least > 0 else NONE
        self._ends = [0, *accumulate(settings.widths)]

    def start(self, requests: int) -> None:
        given = self.settings.of_requests.first(requests)
        self.requests = [
            Request(
                number,
                int(given.roots[number]),
                given.temperatures[number : number + 1],
                int(given.classes[number]) * KINDS,
                given.seeds[number : number + 1],
                bool(given.chained[number]),
                int(given.levels[number]),
                int(given.slots[number]),
            )
            for number in range(requests)
        ]
        self._forward = 0

    def graft(self, trie: Trie) -> None:
        for request in self.requests:
            if request.chained:
                continue
            made: dict[int, Node] = {}
            of_request = (part[request.number].tolist() for part in trie)
            for place, (token, above, evidence, exists) in enumerate(zip(*of_request, strict=True)):
                if not exists or not (above < 0 or above in made) or math.isnan(evidence):
                    continue
                parent = made.get(above)
                known = [max(-MAX_FEATURE, min(evidence, MAX_FEATURE))]
                known.append(self.noise(request, token, 0 if parent is None else parent.depth))
                node = Node(token, parent, 0.0, LOOK_UP, torch.tensor(known))
                if node.depth <= min(self.settings.max_depth, request.levels):
                    node.chance = self._chance(request, node, known[0])
                    node.revalue()
                    made[place] = node
            request.trie = [*made.values()]

    def noise(self, request: Request, token: int, depth: int) -> float:
        """Return the noise of the target's sampler for ``token`` below a node of this depth."""
        if not self.settings.coupled or not bool(request.temperature > 0):
            return 0.0
        zeros, position = torch.zeros(1, token + 1), torch.tensor([request.root + depth])
        heat = torch.ones_like(request.temperature)
        return float(perturbed_logits(zeros, heat, request.seed, position)[0, token])

    def _chance(self, request: Request, node: Node, logit: float) -> float:
        """Return the log of a node's chance, of this ``logit`` where chances are not learned."""
        if self.settings.weights is not None:
            weights = self.settings.weights[request.row + node.kind]
            logit = float(weights[0] + (weights[1:] * node.features).sum())
        return float(torch.nn.functional.logsigmoid(torch.tensor(logit)))

    def resume(self, requests: int, forwards: int) -> None:
        raise AssertionError("it is run as a whole")

    def pick(self, logits: torch.Tensor) -> None:
        width = len(self.requests[0].rows)
        for request, rows in zip(self.requests, logits.split(width), strict=True):
            for node, row in zip(request.rows, rows, strict=True):
                if node is not None or self._forward == 0:
                    self._take(request, node, row[None])

    def _take(self, request: Request, node: Node | None, logits: torch.Tensor) -> None:
        """Take the children of ``node``, None for the root, and judge the trie's below it."""
        position = torch.tensor([request.root + (node.depth if node else 0)])
        scores = temperature_scaled(logits, request.temperature)
        if self.settings.coupled:
            scores = perturbed_logits(logits.float(), request.temperature, request.seed, position)
        total = float(scores.logsumexp(1))
        told = math.isfinite(total)
        beside = [each for each in request.trie if each.above is node]
        for each in beside if told else ():
            self.judge(request, each, scores, total)
        count = self.settings.children
        best = scores.topk(min(max(2, count), scores.shape[1]), 1)
        log_probs = best.values - total if told else torch.full_like(best.values, NONE)
        known = features(log_probs)[0, :count]
        log_probs = only_first(log_probs[:, :count], torch.tensor([request.chained]))
        for place, token in enumerate(best.indices[0, :count].tolist()):
            log_prob = float(log_probs[0, place])
            if log_prob == NONE or self.is_known(token, beside):
                continue
            kind = BESIDE if beside else DRAFT
            child = Node(token, node, log_prob, kind, known[place])
            if self.settings.weights is not None:
                child.chance = self._chance(request, child, log_prob)
                child.revalue()
            request.drafted.append(child)

    def judge(self, request: Request, node: Node, scores: torch.Tensor, total: float) -> None:
        """Take over what the draft says of a node of the trie, and so of the path below it."""
        known = node.token < scores.shape[1]
        log_prob = torch.tensor(float(scores[0, node.token]) - total if known else NONE)
        node.kind, node.features = BOTH, torch.stack([logit_of(log_prob), node.features[0]])
        node.chance = self._chance(request, node, float(node.features[0]))
        for each in request.trie:  # parents come first
            each.revalue()

    def is_known(self, token: int, beside: list[Node]) -> bool:
        """Whether the trie has a child of this token ``beside`` the draft's."""
        return any(each.token == token for each in beside)

    def expand(self, ancestor_bits: torch.Tensor) -> int:
        width, column = self.settings.widths[self._forward], self._ends[self._forward]
        self._forward += 1
        self._values = torch.full((len(self.requests), width), NONE)
        rows, last = self.settings.rows, self.settings.longest
        ancestor_bits.zero_()
        for request in self.requests:
            chosen = self.chosen(request, width)[: max(0, last - request.root - column)]
            request.rows = [*chosen, *[None] * (width - len(chosen))]
            own = slice(request.number * width, (request.number + 1) * width)
            rows.slots[:, own], rows.above[own] = PAD_SLOT, request.number * (1 + self._ends[-1])
            for place, node in enumerate(chosen):
                node.expansion = 1 + column + place
                at = request.number * width + place
                self._values[request.number, place] = node.value
                rows.ids[at] = node.token
                rows.positions[at] = request.root + node.depth + self.settings.shift
                scratch = request.number * self._ends[-1] + column + place
                rows.slots[:, at] = rows.scratch[:, scratch]
                rows.above[at] += 0 if node.above is None else node.above.expansion
                for each in node.path:
                    bit = each.expansion - 1
                    word = 1 << bit % 32
                    ancestor_bits[at, bit // 32] |= word - (1 << 32) * (word >> 31)
        return int((self._values > NONE).sum())

    def chosen(self, request: Request, width: int) -> list[Node]:
        """Return the nodes of the next forward.

        They are the most valuable that have no children yet and may be in the tree: those that are
        worth more than the last of as many candidates as the tree has nodes.
        """
        values = sorted((each.value for each in request.candidates), reverse=True)
        budget = self.settings.node_budget
        bound = values[budget - 1] if len(values) >= budget else NONE
        deepest = min(self.settings.max_depth, request.levels)
        found = [each for each in request.candidates if each.expansion < 0 and each.depth < deepest]
        found.sort(key=lambda each: -each.value)  # stable: parents first
        taken: list[Node] = []
        for node in found:
            open_ = node.above is None or node.above.expansion >= 0
            if len(taken) < width and (open_ or self.runs_paths(node, taken)):
                taken.append(node)
        return [each for each in taken if each.value > bound and each.value >= self._least]

    def runs_paths(self, node: Node, taken: list[Node]) -> bool:
        """Whether a forward may run a node with its parent, which is ``taken``."""
        return self.settings.shift == 0 and node.above in taken

    @property
    def frontier_values(self) -> torch.Tensor:
        return self._values

    def finish(self) -> torch.Tensor:
        trees, budget = self.settings.trees, self.settings.node_budget
        tokens = torch.zeros(len(self.requests), budget, dtype=torch.int64)
        for request in self.requests:
            slot = request.slot
            found = sorted(request.candidates, key=lambda each: -each.value)
            found = [n for i, n in enumerate(found) if i == 0 or n.value >= self._least]
            nodes = [each for each in found if each.value > NONE][:budget]
            trees.grown[slot] = sum(each.value > NONE for each in found)
            trees.counts[slot] = trees.admitted[slot] = len(nodes)
            trees.parents[slot], trees.depths[slot], trees.values[slot] = -1, 1, NONE
            trees.forwards[slot] = 0
            forwards: dict[Node | None, int] = {None: -1}
            for place, node in enumerate(nodes):
                tokens[request.number, place] = node.token
                parent = -1 if node.above is None else nodes.index(node.above)
                trees.parents[slot, place], trees.depths[slot, place] = parent, node.depth
                trees.values[slot, place], trees.kinds[slot, place] = node.value, node.kind
                if trees.features.shape[1]:
                    trees.features[slot, place] = node.features
                drafted = node.kind not in (LOOK_UP, BOTH)
                after = node.depth - 1 if self.settings.shift else forwards[node.above] + 1
                forwards[node] = trees.forwards[slot, place] = after if drafted else 0
            parents = torch.nn.functional.pad(trees.parents[slot] + 1, (1, 0), value=-1)
            trees.ancestors[slot] = ancestor_bits_of(parents[None])[0]
        return tokens
