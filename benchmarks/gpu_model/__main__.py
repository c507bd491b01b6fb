"""The command: python -m benchmarks.gpu_model"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gpu_model.result import result
from benchmarks.gpu_model.tables import TABLES
from dyntree_plugin.commands.vocabulary import shared
from dyntree_plugin.provenance import provenance


def main(
    output: Annotated[Path | None, shared("--output", "A JSON file.")] = None,
) -> None:
    """Model what trees give on an H200, over no speculation and over chains."""
    for name, table in TABLES.items():
        print(f"{name}\n\n{table()}\n")  # noqa: T201
    if output is not None:
        output.write_text(json.dumps(result() | {"provenance": provenance()}) + "\n")


if __name__ == "__main__":
    typer.run(main)
