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
    from dyntree_plugin.engine.step.stages import Rank

# vLLM shows only what is logged below the name of its own package.
logger = init_logger("vllm.dyntree")


MaskRows = Callable[[torch.Tensor, np.ndarray, torch.Tensor], None]
"""Set logits [M, V] to -inf where bitmasks forbid the token: ``mask_rows(logits, rows, bitmask)``.

``rows`` int64 [B]: the row of logits of each row of ``bitmask`` int32 [B, words].
"""


class DraftGrammars:
    """Followers of the texts in vLLM's request states, by slot.

    The states are in the host's memory, and hold what a step emitted before it drafts.
    """

    def __init__(
        self, compiler: GrammarCompiler, states: RequestState, mask_rows: MaskRows, *, waits: bool
    ) -> None:
        """``waits``: wait for grammars that are still compiled when they are needed, so that every
        rank drafts the same; else draft without them."""
        self._compiler = compiler
        self._states = states
        self.mask_rows = mask_rows
        self._waits = waits
        self._compiling: dict[int, Future[Follower]] = {}
        self._read: dict[int, int] = {}
        self._bitmask = torch.empty(0, 0, dtype=torch.int32)

    def add(self, requests: Iterable[NewRequestData]) -> None:
        """Begin requests that have got slots, or begin them anew."""
        for request in requests:
            slot, params = self._states.req_id_to_index[request.req_id], request.sampling_params
            self._compiling.pop(slot, None)
            if params is not None and params.structured_outputs is not None:
                prompt = request.prompt_token_ids or []
                self._compiling[slot] = self._compiler.compile(params, prompt)
                self._read[slot] = int(self._states.prompt_len.np[slot])

    def of(self, packed: torch.Tensor) -> GrammarRanking | None:
        """Follow the texts of the ``packed`` requests; None if no grammar restricts any."""
        if not self._compiling:
            return None
        slots = packed[:, 0].tolist()  # sync: host memory
        found = {slot: follower for slot in slots if (follower := self.follower(slot))}
        return GrammarRanking(found, self) if found else None

    def follower(self, slot: int) -> Follower | None:
        """Follow the text at a slot; None if no grammar restricts what comes next."""
        compiling = self._compiling.get(slot)
        if compiling is None or not (self._waits or compiling.done()):
            return None
        if (error := compiling.exception()) is not None:
            # The scheduler has compiled it, so that this is about drafting alone.
            logger.warning_once("Drafts of a request follow no grammar: %s", error)
            del self._compiling[slot]
            return None
        follower = compiling.result()
        self._follow(slot, follower)
        return follower if follower.restricts else None

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
        self._compiler.close()

    def _follow(self, slot: int, follower: Follower) -> None:
        first, end = self._read[slot], int(self._states.total_len.gpu[slot])  # sync: host memory
        if first < end:
            new = self._states.all_token_ids.gpu[slot, first:end]
            follower.read(new.tolist())  # sync: host memory
            self._read[slot] = end


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
