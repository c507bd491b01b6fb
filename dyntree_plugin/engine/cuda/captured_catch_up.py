"""The catch-up as graphs, which read the target's hidden states where its own graphs leave them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dyntree_plugin.engine.cuda.graphs import Input, RequestGraphs, Tensors
from dyntree_plugin.engine.step.catch_up import CatchUp
from dyntree_plugin.engine.step.growth_stages import DraftStages
from dyntree_plugin.engine.step.records import Emitted, TargetStates
from dyntree_plugin.engine.step.requests import Requests


class CapturedCatchUp:
    """The draft's forward over emitted tokens: a graph for each number of these, and batch size."""

    def __init__(
        self,
        stages: DraftStages,
        requests: Callable[[torch.Tensor], Requests],
        packed: Input,
        emitted: Emitted,
        numbers: Sequence[int],
        sizes: Sequence[int],
        *,
        rows: int,
    ) -> None:
        """``requests``: names the columns of packed requests. ``packed`` and ``emitted``: what the
        graphs read. ``numbers``: of emitted tokens, ascending. ``rows``: of the largest tree."""
        self._stages, self._requests, self._rows = stages, requests, rows
        self._most = len(packed.buffer)
        self.states: StateInputs | None = None
        roots, tokens, counts = emitted.roots, emitted.tokens, emitted.counts
        self._levels = tokens.shape[1] - 1
        inputs = packed, Input(roots), Input(counts)
        self.graphs = {
            number: RequestGraphs(self._run, [*inputs, Input(tokens[:, :number])], sizes)
            for number in numbers
        }
        """By the number of emitted tokens."""

    def read_states(self, hidden: Sequence[torch.Tensor]) -> None:
        """Let graphs read the target's ``hidden`` states; call it before they are captured.

        Without it, and in batches that are too large for the target's graphs, the states are copied
        before.
        """
        if not hidden or not self.graphs:
            return
        self.states = StateInputs(hidden, self._most, self._rows, self._levels)
        for graphs in self.graphs.values():
            graphs.inputs += self.states.inputs

    def replay(self, packed: torch.Tensor, step: CatchUp) -> None:
        """Catch up with a step in which all requests decode."""
        emitted, states = step.emitted, self.states
        most = next(number for number in self.graphs if number >= emitted.most)
        graphs = self.graphs[most]
        given: Tensors = (packed, emitted.roots, emitted.counts, emitted.tokens[:, :most])
        if states is not None and states.serve(graphs.size_for(len(packed))):
            given += states.arguments(step.target)
        else:
            self._stages.receive(replace(emitted, most=most), step.target)
        graphs(*given)

    def _run(self, packed: torch.Tensor, *given: torch.Tensor) -> Tensors:
        roots, counts, tokens, *of_target = given
        emitted = Emitted(roots, tokens, counts, most=tokens.shape[1])
        if self.states is not None and self.states.serve(len(packed)):
            self._stages.receive(emitted, self.states.of(of_target))
        self._stages.catch_up(self._requests(packed), emitted)
        return ()


class StateInputs:
    """`TargetStates` at fixed addresses, for batches that the target's graphs serve.

    Those graphs leave hidden states where the catch-up's read them, and verification writes rows
    and paths there, so that nothing is copied. What is elsewhere is copied.
    """

    def __init__(self, hidden: Sequence[torch.Tensor], most: int, rows: int, levels: int) -> None:
        """``hidden``: where the target's graphs leave the states, of all layers. ``most``: requests
        of a batch. ``rows``: of a tree. ``levels``: of a path."""
        device = hidden[0].device
        self.root_rows = torch.zeros(most, dtype=torch.int64, device=device)
        self.path = torch.full((most, levels), -1, dtype=torch.int64, device=device)
        self._no_path = torch.full_like(self.path, -1)
        self._hidden, self._rows = hidden, rows
        # Padding requests stand at the root of the first one.
        self.inputs = [
            Input(self.root_rows, 0), Input(self.path, -1), *(Input(x, rows=rows) for x in hidden),
        ]  # fmt: skip

    def serve(self, requests: int) -> bool:
        """Return whether the rows of so many requests fit where the target's graphs leave states;
        a larger batch has no such graph."""
        return requests * self._rows <= len(self._hidden[0])

    def arguments(self, target: TargetStates) -> Tensors:
        """Return what ``inputs`` take of a batch."""
        path = self._no_path[: len(target.root_rows)] if target.path is None else target.path
        return target.root_rows, path, *(x[: len(self._hidden[0])] for x in target.hidden)

    @staticmethod
    def of(arguments: Sequence[torch.Tensor]) -> TargetStates:
        """Name the ``arguments``; those who decode need no next tokens of a prompt."""
        root_rows, path, *hidden = arguments
        return TargetStates(tuple(hidden), root_rows, path, root_rows)
