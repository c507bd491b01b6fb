"""The command ``dyntree tune``."""

from __future__ import annotations

import os

import typer
from rich.console import Console

from dyntree_plugin.admission import reasons
from dyntree_plugin.commands.arguments import check_models
from dyntree_plugin.commands.ending import ends_by_signals
from dyntree_plugin.commands.paths import check_new_folder
from dyntree_plugin.commands.start import ready_for_engine
from dyntree_plugin.commands.tune import arguments
from dyntree_plugin.commands.tune.settings import Settings
from dyntree_plugin.strict_json import object_of

TEMPERATURES = (0.0, 0.6, 1.0)
NODES = (16,)


@ends_by_signals()
def tune(
    target: arguments.Target,
    draft: arguments.Draft = None,
    *,
    prompt_file: arguments.PromptFile,
    output: arguments.Output,
    draft_layers: arguments.DraftLayers = None,
    head: arguments.Head = None,
    head_vocabulary: arguments.HeadVocabulary = 32000,
    adapter: arguments.Adapter = None,
    temperatures: arguments.Temperatures = None,
    max_tokens: arguments.MaxTokens = 256,
    epochs: arguments.Epochs = 2,
    rows: arguments.Rows = 8,
    rate: arguments.Rate = None,
    held_out: arguments.HeldOut = 64,
    nodes: arguments.Nodes = None,
    batch: arguments.Batch = 64,
    chat: arguments.Chat = False,
    dtype: arguments.Dtype = "auto",
    seed: arguments.Seed = 0,
    engine_arguments: arguments.EngineArguments = "{}",
) -> None:
    """Fit a draft or an EAGLE-3 head to its target, or make one, on prompts of its users.

    The target continues the prompts in vLLM (write), reads the texts once and keeps its
    probabilities (teach), the draft learns them (fit), and trees on prompts that were held out show
    what it is worth (check). A run that was stopped goes on where it was: give the same command
    again.

    The exit status is 0 if the result is better than what it began with, 1 if not, and 2 if the
    arguments, the prompts or the models are refused.
    """
    # Keeps Intel's OpenMP from warning that numba calls a deprecated function.
    os.environ.setdefault("KMP_WARNINGS", "0")
    with reasons.exit_on_mistake("dyntree tune"):
        given = object_of("--engine-arguments", engine_arguments)
        settings = Settings(
            target, draft, draft_layers, head, head_vocabulary, adapter,
            list(temperatures or TEMPERATURES), max_tokens, epochs, rows,
            rate or _default_rate(draft, head, adapter), held_out, list(nodes or NODES), batch,
            dtype, seed, engine_arguments=given,
        )  # fmt: skip
        _check(settings)
        check_new_folder("--output", output)
        check_models(target, draft)
        if not prompt_file.is_file():
            raise ValueError(f"--prompts {str(prompt_file)!r} must be a JSONL file that exists")
        ready_for_engine()
        from dyntree_plugin.commands.tune.run import run

        better = run(Console(highlight=False), settings, prompt_file, output, chat=chat)
    raise typer.Exit(0 if better else 1)


def _default_rate(draft: str | None, head: str | None, adapter: int | None) -> float:
    """Return the peak rate: a new head begins with random weights."""
    if head is not None and draft is None:
        return 5e-3
    return 1e-3 if adapter is None else 2e-3


def _check(settings: Settings) -> None:
    """Check the arguments that need no model.

    Raises:
        ValueError: if arguments do not go together.
    """
    if not (settings.draft or settings.draft_layers or settings.head):
        raise ValueError(
            "--draft is missing: give the draft to begin with, or let one be made: --draft-layers, "
            "a draft model, or --head eagle3"
        )
    if settings.draft_layers is not None:
        for name in ("draft", "head", "adapter"):
            if getattr(settings, name) is not None:
                raise ValueError(
                    f"--draft-layers goes without --{name}: it makes a new draft model"
                )
    if settings.head is not None and settings.adapter is not None:
        raise ValueError("--head goes without --adapter: all of a head is trained")
