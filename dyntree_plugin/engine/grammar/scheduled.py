"""Structured output in vLLM's scheduler, with trees in place of lists of drafts."""

from __future__ import annotations

import functools
import time
from collections.abc import Container
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request
from vllm.v1.structured_output.utils import strip_speculative_padding

from dyntree_plugin.admission import versions
from dyntree_plugin.engine.grammar.drafts import TreeDrafts
from dyntree_plugin.engine.grammar.walk import ANY, GrammarWalk, Tree

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from vllm.v1.structured_output import StructuredOutputManager


class TreeGrammars:
    """What the scheduler asks of vLLM's manager of structured output.

    vLLM's manager takes a grammar along the list of a request's drafts. This one takes it along
    every path of the tree. It keeps nodes that a grammar forbids: their parents' masks do. Where
    something overrides a mask, a request ends with the token that its grammar refuses.
    """

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager = manager
        self._rows = versions.bitmask_rows(manager)
        self._parents: dict[str, list[int]] = {}
        self._bitmask: torch.Tensor | None = None
        self._seconds: list[float] = []
        self._accepted = True

    def take(self, drafts: DraftTokenIds, requests: Container[str]) -> None:
        """Note the parents of newly drafted nodes; forget those of requests that are no more.

        ``requests``: those that the scheduler knows.
        """
        gone = {each for each in self._parents if each not in requests}
        for request_id in gone.union(drafts.req_ids):
            self._parents.pop(request_id, None)
        if isinstance(drafts, TreeDrafts):
            self._parents.update(zip(drafts.req_ids, drafts.parents, strict=True))

    def validate_tokens(self, request: Request, spec_tokens: list[int]) -> list[int]:
        """Return the drafts to verify: all of them, or none if their parents are not known."""
        if not request.use_structured_output:
            return spec_tokens
        if request.request_id not in self._parents:
            return []
        return strip_speculative_padding(spec_tokens)

    def grammar_bitmask(
        self,
        requests: dict[str, Request],
        structured_output_request_ids: list[str],
        scheduled_spec_decode_tokens: dict[str, list[int]],
    ) -> npt.NDArray[np.int32] | None:
        """Return the masks of the requests in turn: of the root, then of every scheduled draft, and
        of more rows where vLLM reads as many of each request."""
        if not structured_output_request_ids:
            return None
        began = time.perf_counter()
        drafts = [scheduled_spec_decode_tokens.get(i, []) for i in structured_output_request_ids]
        sizes = [self._rows or 1 + len(each) for each in drafts]
        bitmask, first = self._room(sum(sizes)), 0
        for request_id, tokens, rows in zip(
            structured_output_request_ids, drafts, sizes, strict=True
        ):
            tree = self._tree(request_id, tokens)
            self._fill(requests[request_id], tree, bitmask, first)
            bitmask[first + 1 + len(tree.parents) : first + rows] = ANY  # of padding
            first += rows
        self._seconds.append(time.perf_counter() - began)
        return bitmask.numpy()  # sync: host memory

    def read(self, request: Request, token: int) -> bool:
        """Read a token that ``request`` has gained; return whether its grammar accepts it.

        guidance refuses a list that goes on after the end of the text, as trees do with
        ``ignore_eos`` (vLLM 0.32); so tokens are read one by one, as without speculation.
        """
        self._accepted = self._manager.accept_tokens(request, [token])
        return self._accepted

    def accept_tokens(self, request: Request, new_token_ids: list[int]) -> bool:
        """Return whether the grammar accepted the last token that was read.

        vLLM's scheduler asks this of a request directly after it has taken the request's tokens.
        """
        return not request.use_structured_output or self._accepted

    def take_seconds(self) -> list[float]:
        """Return the seconds of each call of `grammar_bitmask` since the last call of this."""
        seconds, self._seconds = self._seconds, []
        return seconds

    def _tree(self, request_id: str, tokens: list[int]) -> Tree:
        drafted = strip_speculative_padding(tokens)
        parents = self._parents.get(request_id, [])[: len(drafted)]
        return Tree(drafted[: len(parents)], parents)

    def _fill(self, request: Request, tree: Tree, bitmask: torch.Tensor, first: int) -> None:
        structured = request.structured_output_request
        if structured is None:
            raise RuntimeError(f"request {request.request_id} has no structured output")
        grammar: Any = structured.grammar
        starts = functools.partial(self._manager._get_constraint_bounds, request)
        before = versions.forbidden_ends(self._manager, request)
        GrammarWalk(request.request_id, grammar, bitmask, first, starts, before).fill(tree)

    def _room(self, rows: int) -> torch.Tensor:
        if self._bitmask is None or len(self._bitmask) < rows:
            backend = self._manager.backend
            if backend is None:
                raise RuntimeError("a grammar was asked for before there was a backend")
            most = max(rows, 2 * (0 if self._bitmask is None else len(self._bitmask)))
            self._bitmask = backend.allocate_token_bitmask(most)
        return self._bitmask[:rows]
