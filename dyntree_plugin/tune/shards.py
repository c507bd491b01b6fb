"""Store what the target teaches: texts, and at every position its law of the next token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

TOP = 64
"""Tokens of a law that are kept, the likeliest ones; the rest is known by its sum."""

FLAT = ("tokens", "top_tokens", "top_log_probs", "states")
"""Tensors of a shard with a row per position. Those of all texts follow one another."""

WEIGHTS = "weights"


@dataclass(frozen=True)
class Sample:
    """A prompt, and what the target wrote behind it at a temperature.

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
    """Write tensors; a process that is killed meanwhile leaves nothing under the file's name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    save_file(dict(tensors), part)
    part.replace(file)


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

    A shard has ``lengths`` int64 [S], and for P positions in all: ``tokens`` int32 [P],
    ``top_tokens`` int32 [P, K] and ``top_log_probs`` float16 [P, K], the law of the token behind
    each position at temperature 1; and ``states`` [P, …] of hidden states, where heads need them.
    """

    def __init__(self, files: Sequence[Path], weights: Sequence[Path] = ()) -> None:
        """``weights``: for each shard a file with float32 [P]; without any, all weigh 1."""
        self._files = files
        self._shards: list[Any] = [safe_open(file, "pt") for file in files]
        self._weights = [load_file(file)[WEIGHTS] for file in weights]
        self._places = [
            _Place(number, slice(end - length, end))
            for number, shard in enumerate(self._shards)
            for length, end in _ends(shard.get_tensor("lengths").tolist())
        ]

    def __len__(self) -> int:
        return len(self._places)

    def weighed(self, weights: Sequence[Path]) -> Shards:
        """Return the same texts with other weights."""
        return Shards(self._files, weights)

    @property
    def lengths(self) -> list[int]:
        """Numbers of tokens of the texts."""
        return [place.length for place in self._places]

    def positions(self) -> int:
        return sum(self.lengths)

    def by_file(self) -> list[list[int]]:
        """Return the numbers of each file's texts."""
        found: list[list[int]] = [[] for _ in self._shards]
        for number, place in enumerate(self._places):
            found[place.file].append(number)
        return found

    def batch(self, numbers: Iterable[int]) -> dict[str, torch.Tensor]:
        """Return texts, padded to the longest: a shard's tensors as [B, L, …], and ``weights``
        float32 [B, L], which are 0 for padding."""
        places = [self._places[number] for number in numbers]
        longest = max(place.length for place in places)
        found = {
            name: _padded([self._rows(place, name) for place in places], longest)
            for name in self._names()
        }
        found[WEIGHTS] = _padded([self._weights_of(place) for place in places], longest)
        found["tokens"] = found["tokens"].long()
        return found

    def _names(self) -> list[str]:
        there = set(self._shards[0].keys())
        return [name for name in FLAT if name in there]

    def _rows(self, place: _Place, name: str) -> torch.Tensor:
        rows: torch.Tensor = self._shards[place.file].get_slice(name)[place.rows]
        return rows

    def _weights_of(self, place: _Place) -> torch.Tensor:
        if not self._weights:
            return torch.ones(place.length)
        return self._weights[place.file][place.rows]


def _ends(lengths: Sequence[int]) -> list[tuple[int, int]]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return list(zip(lengths, ends, strict=True))


def _padded(rows: Sequence[torch.Tensor], longest: int) -> torch.Tensor:
    found = rows[0].new_zeros(len(rows), longest, *rows[0].shape[1:])
    for place, each in zip(found, rows, strict=True):
        place[: len(each)] = each
    return found
