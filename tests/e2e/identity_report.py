"""The results of a comparison on a device, in a file that a later call continues."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gpu_results import of_this
from margins import Verdict

from benchmarks.real.margins import MARGINS
from dyntree_plugin.provenance import provenance


@dataclass(frozen=True)
class Row:
    """The verdict on one engine in one run. A ``control`` has to differ."""

    dtype: str
    engine: str
    run: str
    control: bool
    verdict: Verdict

    @property
    def passed(self) -> bool:
        return (self.verdict.unexcused > 0) == self.control

    def as_json(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "engine": self.engine,
            "run": self.run,
            "control": self.control,
            "passed": self.passed,
            **self.verdict.as_json(),
        }


@dataclass(frozen=True)
class Broken:
    """An engine that gave no answers, or whose answers could not all be judged, and the reason."""

    dtype: str
    engine: str
    reason: str
    passed: bool = False


class Record:
    """The rows of a comparison, written to ``file`` after each engine.

    If the file exists and is of the same code on the same machine, it is continued: its rows stay,
    and its failed engines are dropped with their rows, so that they run again.
    """

    def __init__(self, file: Path, note: str) -> None:
        self._file, self._note = file, note
        self._provenance = provenance()
        self.found: list[Row | Broken] = [*self._earlier()]

    def holds(self, dtype: str, engine: str) -> bool:
        return any((row.dtype, row.engine) == (dtype, engine) for row in self.found)

    def add(self, found: Iterable[Row | Broken]) -> None:
        self.found += found
        written = self._file.with_name(f"{self._file.name}.new")
        written.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        written.replace(self._file)

    def as_json(self) -> dict[str, Any]:
        return {
            "provenance": self._provenance,
            "note": self._note,
            "margins": MARGINS,
            "runs": [row.as_json() for row in self.found if isinstance(row, Row)],
            "failed": [asdict(row) for row in self.found if isinstance(row, Broken)],
        }

    def _earlier(self) -> Iterator[Row]:
        if not self._file.exists():
            return
        known = json.loads(self._file.read_text())
        if of_this(known["provenance"]) != of_this(self._provenance):
            return
        failed = {(each["dtype"], each["engine"]) for each in known["failed"]}
        for run in known["runs"]:
            if (run["dtype"], run["engine"]) in failed:
                continue
            judged = Verdict(**{field.name: run[field.name] for field in fields(Verdict)})
            yield Row(run["dtype"], run["engine"], run["run"], run["control"], judged)


def report(rows: Sequence[Row | Broken]) -> str:
    """Return a table with a line per run."""
    lines = [
        f"{'':9}{'engine':33}{'run':22}{'answers':>8}{'tokens':>8}{'other':>7}{'excused':>8}"
        f"{'largest gap':>12}"
    ]
    for row in rows:
        if isinstance(row, Broken):
            last = row.reason.strip().splitlines()[-1]
            lines.append(f"{row.dtype:9}{row.engine:33}FAILED: {last}")
            continue
        found = row.verdict
        wanted = "must differ" if row.control else ""
        largest = f"{max(found.gaps):.4f}" if found.gaps else "–"
        lines.append(
            f"{row.dtype:9}{row.engine:33}{row.run:22}{found.requests:8}{found.tokens:8}"
            f"{found.excused + found.unexcused:7}{found.excused:8}{largest:>12}"
            f"  {'ok' if row.passed else 'FAILED'} {wanted}".rstrip()
        )
    margins = ", ".join(f"{margin} in {dtype}" for dtype, margin in MARGINS.items())
    lines.append(f"Excused if the two tokens are at most this many logits apart: {margins}.")
    return "\n".join(lines)
