"""Draft forwards as CUDA graphs that end with the logits, which something changes before growth.

What the requests' sampling parameters do to logits reads vLLM's states, whose addresses change from
step to step. So it has no graph, and neither have the children that growth picks after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from dyntree_kernels.paths import Paths
from dyntree_plugin.engine.cuda.graphs import Input, RequestGraphs, Tensors
from dyntree_plugin.engine.step.growth_stages import DraftStages, Rank
from dyntree_plugin.engine.step.requests import Requests

MOST_BYTES = 1 << 27
"""Of the logits of one forward. They must outlive the graph's own memory, and lie beside it."""


class CapturedLogits:
    """The root and every forward up to their logits, each a graph. All share memory for those.

    A block draft has no graph but the root's, whose logits serve all forwards: they look them up.
    """

    def __init__(
        self,
        stages: DraftStages,
        packed: Input,
        sizes: Sequence[int],
        requests: Callable[[torch.Tensor], Requests],
        vocabulary: int,
    ) -> None:
        """``packed``: the memory of the requests, whose batches have ``sizes``. ``requests`` names
        their columns. ``vocabulary``: the target's."""
        self._stages = stages
        self._packed = packed.buffer
        self._requests_of = requests
        self._widths = (1, *stages.widths)
        most = MOST_BYTES // (4 * vocabulary * max(*self._widths, stages.block))
        sizes = [size for size in sizes if size <= most]
        self._room = torch.full(
            (max(sizes, default=0) * max(self._widths), vocabulary), -torch.inf,
            device=stages.device,
        )  # fmt: skip
        self._root = RequestGraphs(self._run_root, [packed], sizes)
        self._forwards = [
            RequestGraphs(partial(self._run_forward, number), [packed], sizes)
            for number in range(len(stages.widths))
        ]

    @property
    def stages(self) -> tuple[RequestGraphs, ...]:
        """The graphs to capture, before `compile`."""
        return self._root, *self._forwards

    def serves(self, requests: int) -> bool:
        """Return whether a batch of so many requests was captured."""
        return self._root.serves(requests)

    def root(self, requests: Requests, rank: Rank) -> None:
        """Replay the root for the requests that were filled in last, and pick its children."""
        count = len(requests.packed)
        self._stages.kept = self._root.replay(count)
        self._stages.resume(requests, 0)
        self._stages.pick_roots(requests, self._room[:count], rank)

    def forward(self, requests: Requests, number: int, rank: Rank) -> None:
        """Do the same with a forward, which comes after so many others."""
        count = len(requests.packed)
        tokens, lengths = self._forwards[number].replay(count)
        self._stages.resume(requests, number + 1)
        logits = self._room[: count * self._stages.widths[number]]
        paths = Paths(tokens.flatten(0, 1), lengths.flatten())
        self._stages.pick(requests, logits, paths, rank)

    def finish(self) -> torch.Tensor:
        """Store the trees of a block draft."""
        return self._stages.finish()

    def compile(self) -> None:
        """Pick all children once: kernels that choose them run without a graph."""
        if not self._root.sizes:
            return
        requests = self._requests_of(self._packed[:1])
        if self._stages.block:
            self.root(requests, lambda logits, *_: logits.float())
            self.finish()
            return
        for forwards, width in enumerate(self._widths):
            self._stages.resume(requests, forwards)
            self._stages.pick(requests, self._room[:width], None, None)

    def _run_root(self, packed: torch.Tensor) -> Tensors:
        logits = self._stages.root_logits(self._requests_of(packed))
        if logits is None:
            raise RuntimeError("without a draft model there are no logits to rank")
        self._keep(logits)
        return self._stages.kept

    def _run_forward(self, number: int, packed: torch.Tensor) -> Tensors:
        requests = self._requests_of(packed)
        self._stages.resume(requests, number)
        logits, paths = self._stages.forward_logits(requests, number)
        self._keep(logits)
        shape = len(packed), self._stages.widths[number]
        return paths.tokens.view(*shape, -1), paths.lengths.view(shape)

    def _keep(self, logits: torch.Tensor) -> None:
        common = min(logits.shape[1], self._room.shape[1])
        self._room[: len(logits), :common].copy_(logits[:, :common])
