"""Stage 1, write: the target continues the prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from dyntree_plugin.commands.loads.pool import Pool
from dyntree_plugin.commands.tune import engines
from dyntree_plugin.commands.tune.prompts import Prompts
from dyntree_plugin.commands.tune.settings import Folder, Settings, Update, write_json
from dyntree_plugin.tune.files import damaged, explained
from dyntree_plugin.tune.shards import Sample

PART = 128
"""Prompts of a part. A killed run repeats at most one part."""


def parts(prompts: Prompts) -> tuple[list[Sequence[list[int]]], int]:
    """Return the prompts in parts, and the number of held-out parts, which come first."""
    cut = [
        [some[at : at + PART] for at in range(0, len(some), PART)]
        for some in (prompts.held_out, prompts.learn)
    ]
    return [*cut[0], *cut[1]], len(cut[0])


def write(folder: Folder, settings: Settings, prompts: Prompts, update: Update) -> None:
    """Write every missing part.

    Raises:
        ValueError: if vLLM refuses the model or an argument.
        RuntimeError: if the engine fails.
    """
    waiting = []
    first = 0
    for number, part in enumerate(parts(prompts)[0]):
        if folder.written(number).exists():
            update(advance=len(part))
        else:
            waiting.append((number, first, part))
        first += len(part)
    if not waiting:
        return
    engine = engines.writing(settings, prompts.longest)
    with Pool(places=1) as pool, pool.engine(engine) as process:
        for number, first, part in waiting:
            _, answers = process.serve(engines.load(settings, part, first))
            written = [
                {"prompt": list(prompt), "answer": list(answer)}
                | engines.sampling(settings, first + place)
                for place, (prompt, answer) in enumerate(zip(part, answers, strict=True))
            ]
            write_json(folder.written(number), written)
            update(advance=len(part))


def samples(folder: Folder, part: int, vocabulary: int) -> list[Sample]:
    """Read a part's texts of a target with ``vocabulary`` tokens.

    Raises:
        ValueError: if the file is damaged.
    """
    file = folder.written(part)
    with explained(damaged(file)):
        samples = [
            Sample(tuple(each["prompt"]), tuple(each["answer"]), each["temperature"], each["seed"])
            for each in json.loads(file.read_text())
        ]
        if not samples:
            raise ValueError("it has no texts")
        for sample in samples:
            _check(sample, vocabulary)
    return samples


def _check(sample: Sample, vocabulary: int) -> None:
    if not (sample.prompt and sample.answer):
        raise ValueError("a prompt or an answer is empty")
    if not all(type(token) is int and 0 <= token < vocabulary for token in sample.tokens):
        raise ValueError("the tokens are not all in the target's vocabulary")
    if not (0 <= sample.temperature < math.inf and 0 <= int(sample.seed) < 1 << 63):
        raise ValueError("a temperature or a seed is out of range")
