"""The command: python -m benchmarks.serve [--help]"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks.serve import exact, shapes
from benchmarks.serve import published as published_models
from dyntree_plugin import pair
from dyntree_plugin.commands.arguments import KINDS, embedded
from dyntree_plugin.commands.bench.command import serve
from dyntree_plugin.commands.bench.session import Extras
from dyntree_plugin.commands.loads.pool import Start
from dyntree_plugin.commands.loads.requests import ALLOWED, Request
from dyntree_plugin.commands.loads.runs import Engine
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
    exact_shape: Annotated[
        Literal["llama-8b", "mimo-7b", "deepseek-v2-lite"] | None,
        option(
            "--exact-shape",
            "SHAPE",
            "Measure Llama-3.1-8B or DeepSeek-V2-Lite with an EAGLE-3 head (--method eagle3), or "
            "MiMo-7B with its module (--method mtp), by shape: random weights, and drafts that are "
            "accepted as often as those of the embedded EAGLE-3 head.",
        ),
    ] = None,
    published: Annotated[
        Literal["smollm2", "gemma3"] | None,
        option(
            "--published",
            "MODEL",
            "Fetch a published model, smollm2 or gemma3, as `make real` does, and take it as "
            "--target; its prompts are those of `make real` by kind, each a name for --prompts: "
            f"{', '.join(published_models.KINDS)}, and {published_models.ALL}, which has all kinds "
            "in turn.",
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
        of_exact = exact_shape and (target_shape or look_ups or weights_at)
        if of_exact:
            raise ValueError("--exact-shape goes without --target-shape, --look-up, --weights-at")
        if published and (target_shape or exact_shape or given["target"]):
            raise ValueError(
                "--published is the target: leave out --target, --target-shape and --exact-shape"
            )
        grown, labels, remarks = _grown(target_shape, given)
        sets: dict[str, list[Request]] = {}
        if published is not None:
            grown, labels, sets = published_models.words(published, given)
        if exact_shape is not None:
            grown, labels, remarks = _exact(exact_shape, given)
        around = None
        if weights_at is not None:
            from benchmarks.serve import slow_weights

            around = partial(slow_weights.linked, weights_at)
            engine = object_of("--engine-arguments", given["engine_arguments"])
            remarks.append(slow_weights.note(weights_at, engine.get("offload_prefetch_step", 1)))
        extras = Extras(
            labels=labels,
            sets=sets,
            notes=[*remarks, *(notes or ())],
            samplings=[object_of("--sampling", each) for each in samplings or ["{}"]],
            look_ups=tuple(dict.fromkeys(look_ups or ())),
            side_by_side=side_by_side,
            around=around,
            starts=_shared if exact_shape else None,
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


def _exact(shape: str, given: dict[str, Any]) -> tuple[list[str], dict[str, str], list[str]]:
    """Return the words that name a target of an exact shape and its draft, their labels, and notes.

    Raises:
        ValueError: if what is measured needs real weights.
    """
    target, head = exact.exact(shape, pair.paths()["target"])
    method = "mtp" if head is None else "eagle3"
    if given["method"] != method or given["target"] is not None or given["draft"] is not None:
        raise ValueError(
            f"--exact-shape {shape} needs --method {method}, without --target, --draft"
        )
    if any(given["temperatures"] or (1.0,)):
        raise ValueError("--exact-shape accepts drafts as at --temperature 0: give that alone")
    if not all(each.isdecimal() for each in given["chains"] or ("",)):
        raise ValueError("--exact-shape needs lengths of greedy chains, such as --chain 5")
    engine = object_of("--engine-arguments", given["engine_arguments"]) | exact.ARGUMENTS
    words = ["--target", str(target), "--engine-arguments", json.dumps(engine)]
    labels = {str(target): f"{shape}, random weights"}
    if head is not None:
        words += ["--draft", str(head)]
        labels[str(head)] = f"an EAGLE-3 head for {shape}, random weights"
    note = (
        f"{shape} with random weights: steps cost what they cost with its own. Drafts are accepted "
        "by chance, as often as those of the embedded EAGLE-3 head for greedy code; between "
        "measured sizes that is interpolated."
    )
    return words, labels, [note]


def _shared(engines: Sequence[Engine]) -> Start:
    from benchmarks.serve.shared import starts

    return starts(engines)


if __name__ == "__main__":
    app()
