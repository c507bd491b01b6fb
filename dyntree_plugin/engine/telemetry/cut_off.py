"""Take tokens after a stop string off the counts, in the process that looks for stop strings."""

from __future__ import annotations

from typing import Any

from dyntree_plugin.engine.telemetry.stats import TreeSpecDecodingStats


class CutOff:
    """Corrects one step's counts, in which the scheduler has counted whole paths.

    Call `ended` for each request that ends in the step, and then `correct`.
    """

    def __init__(self) -> None:
        self._surplus: dict[str, int] = {}
        self._trees = False

    def ended(self, request: Any, iteration: Any) -> None:
        """Take tokens that a ``request`` does not return off vLLM's counts.

        ``request`` is a RequestState, and ``iteration`` the step's IterationStats.
        """
        if not self._trees or request.detokenizer is None:
            return
        counted = request.stats.num_generation_tokens
        surplus = counted - request.detokenizer.num_output_tokens()
        if surplus > 0:
            self._surplus[request.request_id] = surplus
            request.stats.num_generation_tokens -= surplus
            iteration.num_generation_tokens -= surplus

    def correct(self, stats: object) -> None:
        """Take the same tokens off ``stats``. Without trees, vLLM's counts stay as they are."""
        if isinstance(stats, TreeSpecDecodingStats):
            self._trees = True
            for request_id, surplus in self._surplus.items():
                stats.cut(request_id, surplus)
        self._surplus.clear()
