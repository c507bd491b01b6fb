"""Drafted trees on their way from the worker to the scheduler."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from dyntree_plugin.engine.step.ops import Arrival


@dataclass
class TreeDrafts(DraftTokenIds):
    """Drafts whose order says that parents precede their children.

    ``parents``: for each request those of its nodes, -1 for the root. Drafts after the last node
    are padding.
    """

    parents: list[list[int]] = field(default_factory=list)


@dataclass
class _Sent:
    tokens: DraftTokensHandler
    parents: Arrival | None = None


class RecentDrafts:
    """The drafts of the last steps, which the scheduler asks for if a grammar restricts a request.

    vLLM's runner keeps those of its last step. In a pipeline, the scheduler asks for the drafts of
    a batch that was drafted as many steps ago as there are stages.
    """

    def __init__(self, steps: int, device: torch.device) -> None:
        self._sent = deque(_Sent(DraftTokensHandler(device)) for _ in range(steps))

    def next_step(self) -> DraftTokensHandler:
        """Return what takes the tokens of a new step; the oldest step is forgotten."""
        self._sent.rotate(-1)
        self.add_parents(None)
        return self._sent[-1].tokens

    def add_parents(self, parents: Arrival | None) -> None:
        """Note the parents of this step's nodes, after their number, int64 [R, 1 + N]; None if the
        scheduler needs none."""
        self._sent[-1].parents = parents

    def take(self) -> DraftTokenIds | None:
        """Return the drafts of all steps whose parents were noted, of each request the last;
        without any, the drafts of the last step."""
        trees: dict[str, tuple[list[int], list[int]]] = {}
        for sent in self._sent:
            drafts = None if sent.parents is None else sent.tokens.get_draft_tokens()
            if drafts is None or sent.parents is None:
                continue
            rows = sent.parents().tolist()  # sync: it has arrived
            parents = [row[1 : 1 + row[0]] for row in rows]
            each = zip(drafts.draft_token_ids, parents, strict=True)
            trees.update(zip(drafts.req_ids, each, strict=True))
        if not trees:
            return self._sent[-1].tokens.get_draft_tokens()
        found = trees.values()
        return TreeDrafts([*trees], [each[0] for each in found], [each[1] for each in found])
