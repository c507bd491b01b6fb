"""Trees through a recurrent layer of the CPU, and the commit of their accepted paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch

from dyntree_kernels.cpu.recurrence import Order, trees
from dyntree_kernels.recurrence import Commit, TreeStates, inputs


class Layer(NamedTuple):
    """A recurrent layer: a causal convolution, and a recurrence that reads its outputs.

    ``history`` [slots, W - 1, C]: the last inputs of the convolution, the latest one last.
    ``convolve``: takes the inputs [M, W, C] of M rows, each row's own last, to [M, C].
    ``through``: takes what was convolved [T, C], gates [T, G] and an order to outputs [T, ...].
    ``advance``: takes what was convolved [M, C], gates [M, G] and slots int64 [M], which differ,
    and advances the states there by a token each, as plain decoding does. A layer without a
    recurrence has neither.
    """

    history: torch.Tensor
    convolve: Callable[[torch.Tensor], torch.Tensor]
    through: Callable[[torch.Tensor, torch.Tensor, Order], torch.Tensor] | None = None
    advance: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object] | None = None


class TreeForward:
    """Runs the trees of a step through recurrent layers, and leaves their states as they are."""

    def __init__(self, states: TreeStates) -> None:
        self._taps = cache(states.taps)  # Most layers have one width.
        self._slots = states.slots[states.requests]
        self._order = trees(states)

    def __call__(self, layer: Layer, raw: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Return the outputs [T, ...] of rows with inputs ``raw`` [T, C] and ``gates`` [T, G]."""
        taps = self._taps(layer.history.shape[1] + 1)
        mixed = layer.convolve(inputs(taps, raw, layer.history, self._slots))
        return mixed if layer.through is None else layer.through(mixed, gates, self._order)


class PathCommit:
    """Advances recurrent layers along the accepted paths of a step.

    A path that completes a block of the KV cache is taken in two parts, and the states between them
    are copied.
    """

    def __init__(self, accepted: Commit) -> None:
        ends, lengths = accepted.ends, accepted.lengths
        split = (ends > 0) & (ends <= lengths)
        self._parts = [_Part(accepted)]
        self._copied, self._copies = accepted.slots[split], accepted.end_slots[split]
        if len(self._copied):
            taken = torch.where(split, ends, 0)
            columns = torch.arange(accepted.paths.shape[1]) + taken[:, None]
            after = accepted.paths.gather(1, columns.clamp(max=accepted.paths.shape[1] - 1))
            first = accepted._replace(lengths=torch.where(split, ends, lengths))
            rest = accepted._replace(paths=after, lengths=(lengths - taken) * split)
            self._parts = [_Part(each) for each in (first, rest)]

    def __call__(
        self, layer: Layer, raw: torch.Tensor, gates: torch.Tensor, states: Iterable[Any]
    ) -> None:
        """Advance a layer.

        Args:
            layer: the layer.
            raw, gates: [T, C] and [T, G], what its forward got.
            states: all that the layer keeps, the history included; each [slots, ...].
        """
        self._parts[0](layer, raw, gates)
        for each in states if len(self._copied) else ():
            each[self._copies] = each[self._copied]
        for part in self._parts[1:]:
            part(layer, raw, gates)


class _Part:
    """Advances recurrent layers along paths, whatever blocks they complete."""

    def __init__(self, accepted: Commit) -> None:
        accepted = Commit(*(each[accepted.lengths > 0] for each in accepted))
        self._accepted = accepted
        lengths = accepted.lengths
        taken = torch.arange(accepted.paths.shape[1]) < lengths[:, None]
        requests, depths = taken.nonzero(as_tuple=True)
        parents = torch.where(depths == 0, -1, torch.arange(len(depths)) - 1)
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        self._taps = cache(TreeStates(accepted.slots, starts, parents).taps)
        self._kept = cache(accepted.taps)
        self._rows = accepted.paths[taken]
        self._slots = accepted.slots[requests]
        deepest = int(lengths.max()) if len(lengths) else 0
        self._steps = [(depths == depth).nonzero().flatten() for depth in range(deepest)]

    def __call__(self, layer: Layer, raw: torch.Tensor, gates: torch.Tensor) -> None:
        entries, slots = layer.history.shape[1], self._accepted.slots
        if layer.advance is not None:
            own = raw[self._rows]
            taps = self._taps(entries + 1)
            mixed = layer.convolve(inputs(taps, own, layer.history, self._slots))
            gates = gates[self._rows]
            for rows in self._steps:
                layer.advance(mixed[rows], gates[rows], self._slots[rows])
        layer.history[slots] = inputs(self._kept(entries), raw, layer.history, slots)
