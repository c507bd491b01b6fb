"""The format of a result file. It holds nothing that can be computed from the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["plain", "chain", "static tree", "dynamic tree", "server"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Engine(_Record):
    """An engine: its most draft tokens per step, and its arguments for ``LLM`` or its address."""

    name: str
    kind: Kind
    budget: int
    arguments: dict[str, Any]


class Cell(_Record):
    """A set of requests, served at one temperature, ``batch`` of them at a time.

    ``prompts`` names the set, and what ``--sampling`` adds to its requests.
    """

    prompts: str
    temperature: float
    batch: int


class Speculation(_Record):
    """Counts of speculation; ``drafts`` are verified chains or trees."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Fallbacks(_Record):
    """Decoding steps of single requests of an engine with trees, and those with chains or no tree.

    ``by_reason`` counts the latter by the reasons of `dyntree_fallback_steps`.
    """

    request_steps: int = 0
    by_reason: dict[str, int] = Field(default_factory=dict)


class Run(_Record):
    """One engine's work on one cell in one round.

    ``tpot_ms`` is the time per output token after the first, over all requests; ``ttft_ms`` is the
    mean time to the first token. ``steps`` counts engine steps that process no prompt, ``step_ms``
    is their mean time, and ``stages_ms`` the worker's share of it by stage. For an engine in
    another process the metrics give the stages, over all steps.

    ``request_steps`` counts the steps of every single request after that of its first token; 0 if
    they are unknown. Unlike ``speculation`` they go with ``output_tokens``, which has no token
    after the end of an answer.
    """

    round: int
    requests: int
    seconds: float
    output_tokens: int
    tpot_ms: float
    ttft_ms: float
    steps: int = 0
    step_ms: float = 0.0
    stages_ms: dict[str, float] = Field(default_factory=dict)
    request_steps: int = 0
    speculation: Speculation = Speculation()
    fallbacks: Fallbacks = Fallbacks()


class Series(_Record):
    """An engine's runs on a cell.

    At temperature 0, ``differing_requests`` and ``differing_tokens`` count the differences from
    the first engine in the last round, among ``compared_tokens`` tokens.
    """

    engine: str
    cell: Cell
    runs: list[Run]
    differing_requests: int | None = None
    differing_tokens: int | None = None
    compared_tokens: int | None = None


class Result(_Record):
    """A whole measurement."""

    provenance: dict[str, Any]
    settings: dict[str, Any]
    notes: list[str]
    engines: list[Engine]
    series: list[Series]

    def cells(self) -> Iterator[Cell]:
        """Return the cells in the order in which they were measured."""
        yield from dict.fromkeys(series.cell for series in self.series)

    def of(self, cell: Cell) -> dict[str, Series]:
        """Return the series of a cell by engine, in the order of the engines."""
        found = {series.engine: series for series in self.series if series.cell == cell}
        return {engine.name: found[engine.name] for engine in self.engines if engine.name in found}

    def engine(self, name: str) -> Engine:
        return next(engine for engine in self.engines if engine.name == name)


def latencies_ms(
    requests: Sequence[tuple[float, float | None, float, int]],
) -> tuple[float, float]:
    """Compute ``tpot_ms`` and ``ttft_ms`` of a `Run`.

    ``requests`` holds four values for each request: the times in seconds at which it was sent, at
    which it got its first token, and its last, and its number of tokens.

    Raises:
        RuntimeError: if a request got none.
    """
    spent, later, waited = 0.0, 0, 0.0
    for asked, first, last, tokens in requests:
        if first is None:
            raise RuntimeError("a request has ended without a token")
        spent += last - first
        later += tokens - 1
        waited += first - asked
    return 1e3 * spent / max(later, 1), 1e3 * waited / len(requests)


def read(path: Path) -> Result:
    """Read a result file.

    Raises:
        ValueError: if the file has another format.
    """
    return Result.model_validate_json(path.read_text())


def write(result: Result, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(result.model_dump_json(indent=1) + "\n")
