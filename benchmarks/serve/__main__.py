"""The command: python -m benchmarks.serve [--help]"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks.serve import shapes
from dyntree_plugin import pair
from dyntree_plugin.commands.arguments import KINDS, embedded
from dyntree_plugin.commands.bench.command import serve
from dyntree_plugin.commands.bench.session import Extras
from dyntree_plugin.commands.loads.requests import ALLOWED
from dyntree_plugin.commands.vocabulary import option
from dyntree_plugin.options.options import MOST_NODES
from dyntree_plugin.secrets import hidden
from dyntree_plugin.strict_json import object_of

NAME = "python -m benchmarks.serve"
USERS = typer.Typer(add_completion=False)
USERS.command()(serve)
"""`dyntree bench serve`, which takes all other arguments."""
app = typer.Typer(add_completion=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def main(
    context: typer.Context,
    target_shape: Annotated[
        Literal["llama-1b", "llama-3b", "llama-8b", "granite-h-1b"] | None,
        option(
            "--target-shape",
            "SHAPE",
            "Enlarge the embedded target to the cost of llama-1b, llama-3b, llama-8b, or of "
            "granite-h-1b, which has recurrent layers.",
        ),
    ] = None,
    weights_at: Annotated[
        float | None,
        option(
            "--weights-at",
            "GB_PER_S",
            "Simulate offloaded weights on a CPU: a virtual link of this speed delivers the "
            "target's layers in every step, to all engines, as vLLM's prefetching does.",
        ),
    ] = None,
    look_ups: Annotated[
        list[int] | None,
        option(
            "--look-up",
            "N",
            "Nodes of trees of look-up alone, without the draft. Repeatable.",
            min=1,
            max=MOST_NODES,
        ),
    ] = None,
    samplings: Annotated[
        list[str] | None,
        option(
            "--sampling",
            "JSON",
            "Sampling parameters of all requests. Those that a request brings prevail. "
            "Repeatable: every set is served with each; '{}' is without. Allowed: "
            f"{', '.join(ALLOWED)}.",
        ),
    ] = None,
    side_by_side: Annotated[
        int | None, option("--side-by-side", "N", "Engines to keep running.", min=1)
    ] = None,
    time_limit: Annotated[
        float | None,
        option(
            "--time-limit",
            "SECONDS",
            "Time from now. Measurements that would end later are skipped, and the result names "
            "them. The first ones always run.",
            min=1,
        ),
    ] = None,
    notes: Annotated[
        list[str] | None, option("--note", "TEXT", "A line for the result's notes. Repeatable.")
    ] = None,
) -> None:
    """Measure as `dyntree bench serve` does, which takes all further options."""
    command, words = typer.main.get_command(USERS), [*context.args]
    try:
        given = command.make_context(NAME, [*words]).params
        if given["method"] == "ngram" and (target_shape or look_ups):
            raise ValueError("--look-up measures look-up alone: leave out --method ngram")
        grown, labels, remarks = _grown(target_shape, given)
        around = None
        if weights_at is not None:
            from benchmarks.serve import slow_weights

            around = partial(slow_weights.linked, weights_at)
            engine = object_of("--engine-arguments", given["engine_arguments"])
            remarks.append(slow_weights.note(weights_at, engine.get("offload_prefetch_step", 1)))
        extras = Extras(
            labels=labels,
            notes=[*remarks, *(notes or ())],
            samplings=[object_of("--sampling", each) for each in samplings or ["{}"]],
            look_ups=tuple(dict.fromkeys(look_ups or ())),
            side_by_side=side_by_side,
            around=around,
            seconds_left=_until(time_limit),
        )
    except ValueError as error:
        print(f"{NAME}: {hidden(str(error))}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(2) from None
    command.main([*words, *grown], prog_name=NAME, obj=extras)


def _until(limit: float | None) -> Callable[[], float]:
    """Return a function that returns the seconds until the limit."""
    end = math.inf if limit is None else time.monotonic() + limit
    return lambda: end - time.monotonic()


def _grown(shape: str | None, given: dict[str, Any]) -> tuple[list[str], dict[str, str], list[str]]:
    """Return the words that name the enlarged target and its draft, their labels, and notes.

    Raises:
        ValueError: if another target is given, or the embedded one has no such draft.
    """
    if shape is None:
        return [], {}, []
    if given["target"] is not None or given["draft"] is not None:
        raise ValueError("--target-shape grows the embedded target: leave out --target and --draft")
    own, draft = (Path(path) for path in embedded(given["method"]))
    grown = shapes.grown_target(shape, own)
    kind = f"the embedded {KINDS[given['method']]}"
    if given["method"] != "draft_model":
        draft, kind = shapes.grown_head(shape, draft, own), f"{kind} as {shape}"
    proof = ", ".join(f"{key} {value}" for key, value in shapes.proof_of(grown).items())
    labels = {str(path): f"the embedded {n.replace('_', ' ')}" for n, path in pair.paths().items()}
    labels |= {str(grown): f"the embedded target as {shape}", str(draft): kind}
    notes = [f"{shapes.limits(shape)}.", f"Proof of the shape: {proof}."]
    return ["--target", str(grown), "--draft", str(draft)], labels, notes


if __name__ == "__main__":
    app()
