"""What the graphs of drafting take of the device's memory, estimated from a few of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dyntree_plugin.engine.cuda.graphs import Record, RequestGraphs


class GraphMemory:
    """Captures every stage for its two largest batches, and estimates the memory of the others.

    As in vLLM's profile of the target's graphs, the largest batch takes the memory that all graphs
    share. So the next one shows what every further graph takes.
    """

    def __init__(self, free: Callable[[], int]) -> None:
        """``free``: returns the bytes that are free when the device has done its work."""
        self._free = free
        self.left_out = 0
        """Bytes of the graphs that were not captured."""

    def capture(self, stages: Sequence[RequestGraphs], record: Record) -> None:
        for graphs in stages:
            graphs.capture(record, slice(1))
        before = self._free()
        for graphs in stages:
            graphs.capture(record, slice(1, 2))
        taken = max(0, before - self._free())
        further = [len(graphs.sizes) - 1 for graphs in stages if len(graphs.sizes) > 1]
        left_out = sum(further) - len(further)
        self.left_out = taken * left_out // max(1, len(further))
