"""Serve the parts of the comparison with both engines, and keep what was answered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.real.prompts import AT_ONCE, ROOT, TOKENS, Part
from dyntree_plugin.admission.node_limit import NAME
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.pool import Pool
from dyntree_plugin.commands.loads.runs import Engine
from dyntree_plugin.options.options import NAMESPACE
from dyntree_plugin.provenance import packages
from dyntree_plugin.tune.files import whole

NODES = 16
_FEWER_AT_ONCE = 5
_CACHE_BYTES = 1 << 31
"""Size of the KV cache. Pages that are not written take no memory."""

Answers = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Answered:
    """The answers of both engines to a part, and the steps of the one with trees."""

    part: str
    plain: Answers
    trees: Answers
    request_steps: int
    seconds: Sequence[float]

    @property
    def differing(self) -> int:
        both = zip(self.plain, self.trees, strict=True)
        return sum(first_difference(*each) is not None for each in both)


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the place of the first token that differs; the end of the shorter answer is one."""
    if list(plain) == list(other):
        return None
    pairs = enumerate(zip(plain, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(plain), len(other)))


def engines(
    model: Path,
    dtype: str,
    longest: int,
    *,
    nodes: int = NODES,
    drafts: bool = False,
    head: Path | None = None,
    same_bits: bool = False,
) -> tuple[Engine, Engine]:
    """Return the engine without trees, and that with whole trees of look-up.

    ``longest``: tokens of the longest prompt. With ``drafts`` the model is its own draft, too, and
    with a ``head``, of EAGLE-3, that is. With ``same_bits`` both have `exactness` bits: the first
    gets requests that allow no nodes, and other batches.
    """
    shared: dict[str, Any] = {
        "model": str(model),
        "dtype": dtype,
        "max_model_len": longest + TOKENS + nodes + 1,
        "max_num_seqs": AT_ONCE,
        "kv_cache_memory_bytes": _CACHE_BYTES,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "use_tqdm_on_load": False,
    }
    draft = {"method": "draft_model", "model": str(model)} if drafts else {"method": "ngram"}
    if head is not None:
        draft = {"method": "eagle3", "model": str(head.resolve())}
    trees: dict[str, Any] = {
        "speculative_config": {**draft, "num_speculative_tokens": nodes},
        "additional_config": {NAMESPACE: {"budget": "fixed"}},
    }
    without: dict[str, Any] = {}
    if same_bits:
        trees["additional_config"][NAMESPACE]["exactness"] = "bits"
        without = trees | {"max_num_seqs": _FEWER_AT_ONCE}
    return (
        Engine(name="no speculation", kind="plain", budget=0, arguments=shared | without),
        Engine(name="trees", kind="dynamic tree", budget=nodes, arguments=shared | trees),
    )


class Journal:
    """The answers so far, in a file that a later call continues.

    Other code, packages, requests or engines have another file.
    """

    def __init__(self, folder: Path, pair: tuple[Engine, Engine], parts: Sequence[Part]) -> None:
        asked = [asdict(part) for part in parts if not part.round]
        given = [[each.arguments for each in pair], asked, packages(), code()]
        digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()
        self._file = folder / f"{digest[:16]}.json"
        known = json.loads(self._file.read_text()) if self._file.exists() else []
        self.found = {each["part"]: Answered(**each) for each in known}

    def add(self, answered: Answered) -> None:
        self.found[answered.part] = answered
        with whole(self._file) as part:
            part.write_text(json.dumps([asdict(each) for each in self.found.values()]))


def code() -> str:
    """Return a digest of the sources that decide tokens."""
    digest = hashlib.sha256()
    for folder in ("dyntree_plugin", "kernels"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def serve(pair: tuple[Engine, Engine], parts: Iterable[Part]) -> Iterator[Answered]:
    """Yield the answers to each part. Both engines stay, and one of them works at a time."""
    with Pool(places=2) as pool:
        for part in parts:
            served = []
            for engine in pair:
                with pool.engine(engine, []) as process:
                    served.append(process.serve(_load(engine, part.load)))
            (run, plain), (with_trees, trees) = served
            seconds = (run.seconds, with_trees.seconds)
            yield Answered(part.name, plain, trees, with_trees.request_steps, seconds)


def _load(engine: Engine, load: Load) -> Load:
    """Return what the engine is asked: an engine with trees that has no budget, for no nodes."""
    if engine.budget or "additional_config" not in engine.arguments:
        return load
    none = {"extra_args": {NAME: 0}}
    asked = [replace(each, sampling={**each.sampling, **none}) for each in load.requests]
    return replace(load, requests=asked)
