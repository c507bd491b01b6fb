"""Grammars of structured output while trees are drafted, where the host knows the texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.logger import init_logger

from dyntree_plugin.engine.grammar.follower import Follower

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.states import RequestState

    from dyntree_kernels.paths import Paths
    from dyntree_plugin.engine.grammar.compiling import GrammarCompiler
    from dyntree_plugin.engine.step.draft import Ranking
    from dyntree_plugin.engine.step.growth_stages import Rank

# vLLM shows only what is logged below the name of its package.
logger = init_logger("vllm.dyntree")


FAILED, PENDING, READY = -1, 0, 1
"""What became of a grammar. Of several ranks, the least holds."""

Agree = Callable[[list[int]], list[int]]
"""Return the least of every rank's numbers, place by place: all ranks must draft the same trees."""

MaskRows = Callable[[torch.Tensor, np.ndarray, torch.Tensor], None]
"""Set logits [M, V] to -inf where bitmasks forbid the token: ``mask_rows(logits, rows, bitmask)``.

``rows`` int64 [B]: the row of logits of each row of ``bitmask`` int32 [B, words].
"""


class DraftGrammars:
    """Followers of the texts in vLLM's request states, by slot.

    The states are in the host's memory, and hold what a step emitted before it drafts.
    """

    def __init__(
        self, compiler: GrammarCompiler, states: RequestState, mask_rows: MaskRows, agree: Agree
    ) -> None:
        self._compiler = compiler
        self._states = states
        self.mask_rows = mask_rows
        self._agree = agree
        self._compiling: dict[int, Future[Follower]] = {}
        self._compiled: dict[int, Follower] = {}
        self._read: dict[int, int] = {}
        self._bitmask = torch.empty(0, 0, dtype=torch.int32)

    def begin_step(self, requests: Iterable[NewRequestData]) -> None:
        """Forget the grammars of requests that have no slot any more; compile those of
        ``requests``, which have got one."""
        for slot in [*self._compiling, *self._compiled]:
            if slot not in self._states.index_to_req_id:
                self._forget(slot)
        for request in requests:
            slot, params = self._states.req_id_to_index[request.req_id], request.sampling_params
            self._forget(slot)
            if params is not None and params.structured_outputs is not None:
                prompt = request.prompt_token_ids or []
                self._compiling[slot] = self._compiler.compile(params, prompt)
                self._read[slot] = int(self._states.prompt_len.np[slot])

    def of(self, packed: torch.Tensor) -> GrammarRanking | None:
        """Follow the texts of the ``packed`` requests; None if no grammar restricts any."""
        found = self.followers(packed[:, 0])
        return GrammarRanking(found, self) if found else None

    def followers(self, slots: torch.Tensor) -> dict[int, Follower]:
        """Follow the texts at ``slots`` int64 [R]; return, by slot, the grammars that restrict
        what comes next. All ranks must ask for the same slots."""
        if not (self._compiling or self._compiled):
            return {}
        asked = slots.tolist()  # sync: host memory
        self._take_compiled([slot for slot in asked if slot in self._compiling])
        found = {slot: self._compiled[slot] for slot in asked if slot in self._compiled}
        for slot, follower in found.items():
            self._follow(slot, follower)
        return {slot: follower for slot, follower in found.items() if follower.restricts}

    def room(self, rows: int) -> torch.Tensor:
        """Return a bitmask of so many rows; the next call returns the same memory.

        There must be a follower.
        """
        if len(self._bitmask) < rows:
            self._bitmask = self._compiler.allocate(rows)
        return self._bitmask[:rows]

    def close(self) -> None:
        """Forget all grammars."""
        self._compiling.clear()
        self._compiled.clear()
        self._compiler.close()

    def _forget(self, slot: int) -> None:
        self._compiled.pop(slot, None)
        compiling = self._compiling.pop(slot, None)
        if compiling is not None:
            compiling.cancel()  # Others wait until it is compiled.

    def _take_compiled(self, slots: list[int]) -> None:
        """Take the grammars at these ``slots`` that every rank has compiled."""
        if not slots:
            return
        agreed = self._agree([_status(self._compiling[slot]) for slot in slots])
        for slot, status in zip(slots, agreed, strict=True):
            if status == READY:
                self._compiled[slot] = self._compiling.pop(slot).result()
            elif status == FAILED:
                # The scheduler has compiled it, so that this is about drafting alone.
                logger.warning_once("Drafts of a request follow no grammar: %s", self._error(slot))
                self._forget(slot)

    def _error(self, slot: int) -> object:
        compiling = self._compiling[slot]
        own = compiling.exception() if compiling.done() else None
        return own or "another rank could not compile it"

    def _follow(self, slot: int, follower: Follower) -> None:
        first, end = self._read[slot], int(self._states.total_len.gpu[slot])  # sync: host memory
        if first < end:
            new = self._states.all_token_ids.gpu[slot, first:end]
            follower.read(new.tolist())  # sync: host memory
            self._read[slot] = end


def _status(compiling: Future[Follower]) -> int:
    if not compiling.done():
        return PENDING
    return READY if compiling.exception() is None else FAILED


class GrammarRanking:
    """Excludes from a draft's logits the tokens that grammars forbid."""

    def __init__(self, followers: dict[int, Follower], grammars: DraftGrammars) -> None:
        """``followers``: by slot."""
        self._followers = followers
        self._grammars = grammars

    def __call__(self, logits: torch.Tensor, index: torch.Tensor, paths: Paths) -> torch.Tensor:
        """Return what growth should rank, of a draft's logits [R * W, V]; these stay.

        ``index`` int64 [R]: the slots. ``paths``: of the rows' nodes; W rows per request follow one
        another.
        """
        width = len(logits) // max(1, len(index))
        lengths, tokens = paths.lengths.numpy(), paths.tokens.numpy()  # sync: host memory
        slots = index.tolist()  # sync: host memory
        places = [place for place, slot in enumerate(slots) if slot in self._followers]
        rows = [place * width + row for place in places for row in range(width)]
        bitmask = self._grammars.room(len(rows))
        for at, row in enumerate(rows):
            path = tokens[row, : lengths[row]].tolist()  # sync: host memory
            self._followers[slots[row // width]].mask(path, bitmask, at)
        found = logits.clone()
        self._grammars.mask_rows(found, np.array(rows, dtype=np.int64), bitmask)
        return found


class InTurn:
    """Rankings one after the other: the target's sampler applies grammars before parameters."""

    def __init__(self, *rankings: Ranking) -> None:
        self._rankings = rankings

    def of(self, packed: torch.Tensor) -> Rank | None:
        """Return what the ``packed`` requests need of all of them; None if they need nothing."""
        found = [needed for each in self._rankings if (needed := each.of(packed)) is not None]
        if len(found) < 2:
            return found[0] if found else None

        def rank(logits: torch.Tensor, index: torch.Tensor, paths: Paths) -> torch.Tensor:
            for each in found:
                logits = each(logits, index, paths)
            return logits

        return rank
