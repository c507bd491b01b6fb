"""How long one forward takes, by its rows: what modelled speed-ups are made from."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.acceptance.models import Decoder

ROWS = (1, 2, 4, 8, 17, 33, 65, 129, 257, 513, 769)
_CONTEXT = 128
_REPEATS = 9


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of one forward for one request, by rows; linear in between and beyond."""

    target: dict[int, float]
    draft: dict[int, float]
    source: str

    @classmethod
    def read(cls, path: Path) -> StepTimes:
        """From JSON ``{"target": {"1": ms, …}, "draft": {"1": ms, …}}``.

        Raises:
            ValueError: if it says something else, or does not start at one row.
        """
        try:
            told = json.loads(path.read_text())
            times = {
                name: {int(rows): float(ms) for rows, ms in told[name].items()}
                for name in ("target", "draft")
            }
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"--step-times {path}: {error!r}") from error
        for name, table in times.items():
            if 1 not in table or min(table.values()) <= 0:
                raise ValueError(f"--step-times {path}: {name} needs positive times from 1 row on")
        return cls(times["target"], times["draft"], str(path))

    @classmethod
    def measure(cls, target: PreTrainedModel, draft: PreTrainedModel) -> StepTimes:
        """Of these models here and now: the median of several forwards behind 128 tokens."""
        measured = (_measure(target), _measure(draft))
        return cls(*measured, f"measured with transformers on {target.device}")

    def speedup(self, tokens: float, nodes: float, forwards: float, expanded: float) -> float:
        """Modelled, against decoding one token per step: ``tokens`` and ``nodes`` per step, draft
        ``forwards`` of together ``expanded`` rows."""
        drafting = forwards * _at(self.draft, expanded / forwards) if forwards else 0.0
        return tokens * _at(self.target, 1) / (_at(self.target, 1 + nodes) + drafting)


def _at(times: dict[int, float], rows: float) -> float:
    known = sorted(times)
    if rows > known[-1] and len(known) > 1:
        left, right = known[-2:]
        slope = (times[right] - times[left]) / (right - left)
        return times[right] + slope * (rows - right)
    return float(np.interp(rows, known, [times[n] for n in known]))


@torch.inference_mode()
def _measure(model: PreTrainedModel) -> dict[int, float]:
    decoder = Decoder(model, 1, _CONTEXT)
    context = torch.arange(_CONTEXT, device=model.device)[None] % model.config.vocab_size
    decoder.append(context, torch.full_like(decoder.lengths, _CONTEXT))
    times = {}
    for rows in ROWS:
        samples = []
        for _ in range(_REPEATS + 1):
            branches = decoder.branches(rows, 1)
            ones = torch.ones(1, rows, dtype=torch.int64, device=model.device)
            words = torch.zeros(1, rows, -(-rows // 32), dtype=torch.int32, device=model.device)
            _wait(model.device)
            started = time.perf_counter()
            branches.extend(ones, ones, words, ones.bool())
            _wait(model.device)
            samples.append(time.perf_counter() - started)
        times[rows] = 1000 * statistics.median(samples[1:])
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
