"""Several drafts over the same texts, as one decoder: see `dyntree_plugin.tree.pooled`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from benchmarks.acceptance.models import Branches, Decoder
from dyntree_plugin.tree.pooled import mixture


class PooledDecoder:
    """Decoders of several drafts, whose logits are mixed."""

    def __init__(self, models: Sequence[PreTrainedModel], requests: int, positions: int) -> None:
        """As of `Decoder`."""
        self._decoders = [Decoder(model, requests, positions) for model in models]

    @property
    def lengths(self) -> torch.Tensor:
        return self._decoders[0].lengths

    def keep(self, requests: torch.Tensor) -> None:
        for decoder in self._decoders:
            decoder.keep(requests)

    def append(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Do as `Decoder.append`."""
        return mixture([decoder.append(tokens, counts) for decoder in self._decoders])

    def branches(self, columns: int, depth: int) -> _PooledBranches:
        return _PooledBranches([decoder.branches(columns, depth) for decoder in self._decoders])


DraftDecoder = Decoder | PooledDecoder


class _PooledBranches:
    """Every draft runs on every node."""

    def __init__(self, branches: Sequence[Branches]) -> None:
        self._branches = branches

    def extend(self, *nodes: torch.Tensor) -> torch.Tensor:
        """Do as `Branches.extend`."""
        return mixture([each.extend(*nodes) for each in self._branches])
