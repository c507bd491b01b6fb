"""The format of a result file. It holds nothing that can be computed from the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dyntree_plugin.commands.loads.runs import Engine, Record, Run
from dyntree_plugin.tune.files import whole


class Cell(Record):
    """A set of requests, served at one temperature, ``batch`` of them at a time.

    ``prompts`` names the set, and what ``--sampling`` adds to its requests.
    """

    prompts: str
    temperature: float
    batch: int

    @property
    def title(self) -> str:
        drawing = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        return f"{self.prompts}, {drawing}, batch {self.batch}"


class Series(Record):
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


class Result(Record):
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
        series = {each.engine: each for each in self.series if each.cell == cell}
        return {each.name: series[each.name] for each in self.engines if each.name in series}

    def engine(self, name: str) -> Engine:
        return next(engine for engine in self.engines if engine.name == name)


def read(path: Path) -> Result:
    """Read a result file.

    Raises:
        ValueError: if the file has another format.
    """
    return Result.model_validate_json(path.read_text())


def write(result: Result, path: Path) -> None:
    """Write a result file as a whole: stopped meanwhile, the command leaves it as it was.

    Raises:
        ValueError: if it cannot be written.
    """
    text = result.model_dump_json(indent=1) + "\n"
    if path.exists() and not path.is_file():  # such as /dev/stdout, which must not be replaced
        path.write_text(text)
        return
    with whole(path.resolve()) as part:
        part.write_text(text)
