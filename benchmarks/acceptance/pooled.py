"""Several drafts over the same texts, as one decoder: see `dyntree_plugin.tree.pooled`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from benchmarks.acceptance.models import Branches, Decoder
from dyntree_plugin.tree.pooled import apart, mixture


class TreeBranches(Protocol):
    """What `Branches` does."""

    def extend(
        self,
        tokens: torch.Tensor,
        depths: torch.Tensor,
        ancestors: torch.Tensor,
        valid: torch.Tensor,
    ) -> torch.Tensor: ...


class DraftDecoder(Protocol):
    """What growth asks of a `Decoder`."""

    @property
    def lengths(self) -> torch.Tensor: ...
    def keep(self, requests: torch.Tensor) -> None: ...
    def append(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor: ...
    def branches(self, columns: int, depth: int) -> TreeBranches: ...


class PooledDecoder:
    """Decoders of several drafts, whose logits are mixed, or which grow a tree each."""

    def __init__(
        self, models: Sequence[PreTrainedModel], requests: int, positions: int, trees_apart: bool
    ) -> None:
        """``trees_apart``: as in `DraftModels`. The rest is as in `Decoder`."""
        self._decoders = [Decoder(model, requests, positions) for model in models]
        self._trees_apart = trees_apart

    @property
    def lengths(self) -> torch.Tensor:
        return self._decoders[0].lengths

    def keep(self, requests: torch.Tensor) -> None:
        for decoder in self._decoders:
            decoder.keep(requests)

    def append(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Do as `Decoder.append`; drafts that grow a tree each give [R * drafts, V]."""
        logits = [decoder.append(tokens, counts) for decoder in self._decoders]
        return apart(logits, len(counts)) if self._trees_apart else mixture(logits)

    def branches(self, columns: int, depth: int) -> TreeBranches:
        each = [decoder.branches(columns, depth) for decoder in self._decoders]
        return _PooledBranches(each, self._trees_apart)


class _PooledBranches:
    """Every draft runs on every node; or on those of its own tree, an equal part of a frontier."""

    def __init__(self, branches: Sequence[Branches], trees_apart: bool) -> None:
        self._branches = branches
        self._trees_apart = trees_apart

    def extend(
        self,
        tokens: torch.Tensor,
        depths: torch.Tensor,
        ancestors: torch.Tensor,
        valid: torch.Tensor,
    ) -> torch.Tensor:
        if not self._trees_apart:
            every = [each.extend(tokens, depths, ancestors, valid) for each in self._branches]
            return mixture(every)
        part = valid.shape[1] // len(self._branches)
        whose = torch.arange(valid.shape[1], device=valid.device) // part
        own = [
            each.extend(tokens, depths, ancestors, valid & (whose == number))
            for number, each in enumerate(self._branches)
        ]
        _, slots = valid.nonzero(as_tuple=True)
        found = own[0].new_empty(len(slots), own[0].shape[1])
        for number, logits in enumerate(own):
            found[whose[slots] == number] = logits
        return found
