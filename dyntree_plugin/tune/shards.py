"""Store texts of the target and, for each position, its distribution of the next token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dyntree_plugin.tune.files import damaged, explained, whole

TOP = 64
"""Likeliest tokens of a distribution that are kept; of the rest only the sum is known."""

FLAT = {"tokens": "I32", "top_tokens": "I32", "top_log_probs": "F16", "states": "BF16"}
"""Tensors of a shard with a row per position, and their types in safetensors. The rows of a text
follow those of the text before."""

WEIGHTS = "weights"

Batch = Mapping[str, torch.Tensor]
"""Tensors whose first dimension is the samples of a step."""

_LOGITS_AT_ONCE = 1 << 25
"""Logits that a model makes at once if a text has no more; an fp32 copy of them takes 128 MiB."""


def positions_at_once(logits: int) -> int:
    """Return how many positions a model reads at once that makes this many logits for each."""
    return max(1, _LOGITS_AT_ONCE // logits)


def pieces(batch: Batch, positions: int) -> Iterator[Batch]:
    """Yield the samples of a batch of [B, L, …] by up to ``positions``, but whole samples."""
    rows, length = next(iter(batch.values())).shape[:2]
    at_once = max(1, positions // length)
    for start in range(0, rows, at_once):
        yield {name: each[start : start + at_once] for name, each in batch.items()}


@dataclass(frozen=True)
class Sample:
    """A prompt, and what the target wrote after it at a temperature.

    ``seed`` determines the noise of the target's sampler.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float
    seed: int

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.answer


def save_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write tensors as `whole` does."""
    with whole(file) as part:
        save_file(dict(tensors), part)


@dataclass(frozen=True)
class _Place:
    """A text: its file, and its rows there."""

    file: int
    rows: slice

    @property
    def length(self) -> int:
        return int(self.rows.stop - self.rows.start)


class Shards:
    """The texts of several shards by number.

    A shard has ``lengths`` int64 [S] and, for all P positions, ``tokens`` int32 [P], and
    ``top_tokens`` int32 [P, K] and ``top_log_probs`` float16 [P, K], the distribution of the next
    token at temperature 1. For heads it also has hidden ``states`` [P, …].
    """

    def __init__(self, files: Sequence[Path], vocabulary: int | None = None) -> None:
        """``vocabulary``: size of the target's; None not to check the tokens.

        Raises:
            ValueError: if a file is damaged.
        """
        self._shards = [_opened(file, vocabulary) for file in files]
        self._places = [
            _Place(number, slice(end - length, end))
            for number, shard in enumerate(self._shards)
            for length, end in _ends(shard.get_tensor("lengths").tolist())
        ]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def lengths(self) -> list[int]:
        """Numbers of tokens of the texts."""
        return [place.length for place in self._places]

    @property
    def largest(self) -> int:
        """The largest token of the texts."""
        return max(int(shard.get_tensor("tokens").max()) for shard in self._shards)

    def positions(self) -> int:
        return sum(self.lengths)

    def by_file(self) -> list[list[int]]:
        """Return the numbers of each file's texts."""
        numbers: list[list[int]] = [[] for _ in self._shards]
        for number, place in enumerate(self._places):
            numbers[place.file].append(number)
        return numbers

    def batch(self, numbers: Iterable[int]) -> dict[str, torch.Tensor]:
        """Return texts, padded to the longest: a shard's tensors as [B, L, …], and ``weights``
        float32 [B, L], which are 0 for padding."""
        places = [self._places[number] for number in numbers]
        longest = max(place.length for place in places)
        batch = {
            name: _padded([self._rows(place, name) for place in places], longest)
            for name in self._names()
        }
        batch[WEIGHTS] = _padded([torch.ones(place.length) for place in places], longest)
        batch["tokens"] = batch["tokens"].long()
        return batch

    def _names(self) -> list[str]:
        there = set(self._shards[0].keys())
        return [name for name in FLAT if name in there]

    def _rows(self, place: _Place, name: str) -> torch.Tensor:
        rows: torch.Tensor = self._shards[place.file].get_slice(name)[place.rows]
        return rows


def _opened(file: Path, vocabulary: int | None) -> Any:
    """Open a shard, and check its tensors."""
    with explained(damaged(file)):
        shard: Any = safe_open(file, "pt")
        positions = _positions(shard)
        lengths = shard.get_tensor("lengths")
        if lengths.dtype != torch.int64 or lengths.min() < 1 or lengths.sum() != positions:
            raise ValueError("lengths are not those of its texts")
        for name in {*shard.keys()} - {"lengths"}:
            rows = shard.get_slice(name)
            if rows.get_dtype() != FLAT[name] or rows.get_shape()[0] != positions:
                raise ValueError(f"{name} has another type or size than it must have")
        top_tokens, top_log_probs = map(shard.get_tensor, ("top_tokens", "top_log_probs"))
        for tokens in (shard.get_tensor("tokens"), top_tokens):
            if tokens.min() < 0 or tokens.max() >= (vocabulary or 2**31 - 1):
                raise ValueError("tokens are not all in the target's vocabulary")
        if top_tokens.shape != top_log_probs.shape or not (top_log_probs <= 0).all():
            raise ValueError("top_log_probs are not those of top_tokens")
    return shard


def _positions(shard: Any) -> int:
    return int(shard.get_slice("tokens").get_shape()[0])


def _ends(lengths: Sequence[int]) -> list[tuple[int, int]]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return list(zip(lengths, ends, strict=True))


def _padded(rows: Sequence[torch.Tensor], longest: int) -> torch.Tensor:
    padded = rows[0].new_zeros(len(rows), longest, *rows[0].shape[1:])
    for place, each in zip(padded, rows, strict=True):
        place[: len(each)] = each
    return padded
