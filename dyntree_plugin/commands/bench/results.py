"""What a measurement leaves behind: the file's format, and nothing that can be computed from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["plain", "chain", "static tree", "dynamic tree", "server"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Engine(_Record):
    """``budget``: most draft tokens of a step. ``arguments``: of ``LLM``, or where it is served."""

    name: str
    kind: Kind
    budget: int
    arguments: dict[str, Any]


class Cell(_Record):
    """A set of prompts, served at one temperature, ``batch`` requests at a time."""

    prompts: str
    temperature: float
    batch: int


class Speculation(_Record):
    """``drafts``: verified chains or trees."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Run(_Record):
    """One engine's work on one cell in one round.

    ``tpot_ms``: time per output token behind the first, over all requests. ``ttft_ms``: mean time
    to the first. ``steps`` are engine steps without a prompt in them, ``step_ms`` their mean and
    ``stages_ms`` what the worker spent of that; of an engine in another process, what its metrics
    say, over all steps.
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
    speculation: Speculation = Speculation()


class Series(_Record):
    """An engine's runs on a cell.

    At temperature 0, ``differing_requests`` and ``differing_tokens`` count those that the first
    engine answered otherwise, in the last round; ``compared_tokens`` is out of how many.
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
        """In the order in which they were measured."""
        yield from dict.fromkeys(series.cell for series in self.series)

    def of(self, cell: Cell) -> dict[str, Series]:
        """By engine, in the order of the engines."""
        found = {series.engine: series for series in self.series if series.cell == cell}
        return {engine.name: found[engine.name] for engine in self.engines if engine.name in found}

    def engine(self, name: str) -> Engine:
        return next(engine for engine in self.engines if engine.name == name)


def latencies_ms(
    requests: Sequence[tuple[float, float | None, float, int]],
) -> tuple[float, float]:
    """``tpot_ms`` and ``ttft_ms`` of a `Run`.

    ``requests``: of each the seconds at which it was asked and got its first and its last token,
    and how many tokens it got.

    Raises:
        RuntimeError: if a request got none.
    """
    spent, behind, waited = 0.0, 0, 0.0
    for asked, first, last, tokens in requests:
        if first is None:
            raise RuntimeError("a request has ended without a token")
        spent += last - first
        behind += tokens - 1
        waited += first - asked
    return 1e3 * spent / max(behind, 1), 1e3 * waited / len(requests)


def read(path: Path) -> Result:
    """A result file.

    Raises:
        ValueError: if the file is none.
    """
    return Result.model_validate_json(path.read_text())


def write(result: Result, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(result.model_dump_json(indent=1) + "\n")
