"""Check a tuning's input, and run it."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import typer
from rich.console import Console
from transformers.utils import logging

from dyntree_plugin.commands.ending import Ended
from dyntree_plugin.commands.engine import text_config_of, tokenizer_of
from dyntree_plugin.commands.tune import drafts, heads, models, prompts
from dyntree_plugin.commands.tune.prompts import Prompts
from dyntree_plugin.commands.tune.settings import Folder, Settings
from dyntree_plugin.commands.tune.tuning import Tuning
from dyntree_plugin.tune.fit import Machine


def run(
    console: Console, settings: Settings, prompt_file: Path, output: Path, *, chat: bool
) -> bool:
    """Run the tuning; return whether the result is better than the draft that it began with.

    Raises:
        ValueError: if the prompts or the models are invalid.
    """
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    _check_packages(settings)
    prompts = _prompts(settings, prompt_file, chat=chat)
    settings = replace(settings, digest=prompts.digest)
    tuning = Tuning(console, Folder(output), settings, prompts, Machine.present())
    try:
        return tuning.run()
    except Ended:
        tuning.console.print("Stopped. The same command continues.")
        raise
    except RuntimeError as error:
        print(f"dyntree tune: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1) from None


def _check_packages(settings: Settings) -> None:
    wanted = ["matplotlib", *(["peft"] if settings.adapter is not None else [])]
    wanted += ["accelerate"] if Machine.present().devices is not None else []
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        raise ValueError(f"tune needs {', '.join(missing)}: pip install 'vllm-dyntree[tune]'")


def _prompts(settings: Settings, file: Path, *, chat: bool) -> Prompts:
    """Read the prompts, and check what can be checked without weights."""
    context = text_config_of(settings.target).max_position_embeddings
    tokenizer = tokenizer_of(settings.target)
    for model in filter(None, (settings.target, settings.draft)):
        models.check_weights(Path(model), "get the model again")
    if settings.head is not None:
        heads.config_of(settings)
    elif settings.draft_layers is not None:
        drafts.check(settings, settings.draft_layers)
    elif settings.draft is not None:
        models.check(settings.target, settings.draft, tokenizer)
        context = min(context, text_config_of(settings.draft).max_position_embeddings)
    most = context - settings.tokens - max(settings.nodes) - 1
    if most < 1:
        raise ValueError(
            f"--max-tokens {settings.tokens} and --nodes {max(settings.nodes)} leave no room for a "
            f"prompt: the models read at most {context} tokens"
        )
    texts = prompts.read(file, tokenizer, most, settings.held_out, settings.seed, chat=chat)
    if settings.rows > len(texts.learn):
        raise ValueError(
            f"--rows {settings.rows} must be at most {len(texts.learn)}, the number of prompts "
            "that are learned: those of --prompts without those of --held-out"
        )
    return texts
