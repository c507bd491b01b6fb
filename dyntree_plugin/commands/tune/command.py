"""The command ``dyntree tune``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from dyntree_plugin.admission import reasons
from dyntree_plugin.commands.start import without_progress_bars
from dyntree_plugin.commands.tune import arguments, prompts
from dyntree_plugin.commands.tune.prompts import Prompts
from dyntree_plugin.commands.tune.settings import Folder, Settings
from dyntree_plugin.strict_json import object_of

if TYPE_CHECKING:
    from dyntree_plugin.commands.tune.tuning import Tuning

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

TEMPERATURES = (0.0, 0.6, 1.0)
NODES = (16,)


def main(words: Sequence[str]) -> None:
    """Run it with its arguments; ends the process.

    Exit status: 0 if the result is better than what it began with, 1 if not, 2 if the arguments,
    the prompts or the models are refused.
    """
    without_progress_bars()
    app(list(words), prog_name="dyntree tune")


@app.command()
def tune(
    target: arguments.Target,
    draft: arguments.Draft = None,
    *,
    prompt_file: arguments.PromptFile,
    output: arguments.Output,
    head: arguments.Head = None,
    head_vocabulary: arguments.HeadVocabulary = 32000,
    adapter: arguments.Adapter = None,
    pool: arguments.Pool = 1,
    boost: arguments.Boost = "positions",
    temperatures: arguments.Temperatures = None,
    tokens: arguments.Tokens = 256,
    epochs: arguments.Epochs = 2.0,
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
    """Fit a draft, a pool of drafts, or an EAGLE-3 head to its target, on prompts such as users
    send.

    The target continues the prompts in vLLM (write), reads the texts once and keeps its
    probabilities (teach), the draft learns them (fit), and trees on prompts that were held out show
    what it is worth (check). A run that was stopped goes on where it was: give the same command
    again.
    """
    settings = Settings(
        target, draft, head, head_vocabulary, adapter, pool, boost,
        list(temperatures or TEMPERATURES), tokens, epochs, rows,
        rate or _default_rate(draft, head, adapter), held_out, list(nodes or NODES), batch, dtype,
        seed,
    )  # fmt: skip
    console = Console(highlight=False)
    with reasons.exit_on_mistake("dyntree tune"):
        _check_packages(settings)
        from dyntree_plugin.commands.tune.tuning import Tuning
        from dyntree_plugin.tune.fit import Machine

        given = object_of("--engine-arguments", engine_arguments)
        settings = replace(settings, engine_arguments=given)
        found = _prompts(settings, prompt_file, chat=chat)
        settings = replace(settings, digest=found.digest)
        tuning = Tuning(console, Folder(output), settings, found, Machine.present())
        better = _run(tuning)
    raise typer.Exit(0 if better else 1)


def _default_rate(draft: str | None, head: str | None, adapter: int | None) -> float:
    """Return the peak rate: a new head begins with random weights."""
    if head is not None and draft is None:
        return 5e-3
    return 1e-3 if adapter is None else 2e-3


def _run(tuning: Tuning) -> bool:
    try:
        return tuning.run()
    except KeyboardInterrupt:
        tuning.console.print("Stopped. The same command goes on from here.")
        raise typer.Exit(130) from None
    except RuntimeError as error:
        print(f"dyntree tune: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1) from None


def _check_packages(settings: Settings) -> None:
    from dyntree_plugin.tune.fit import Machine

    wanted = ["matplotlib", *(["peft"] if settings.adapter is not None else [])]
    wanted += ["accelerate"] if Machine.present().devices is not None else []
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        raise ValueError(f"tune needs {', '.join(missing)}: pip install 'vllm-dyntree[tune]'")


def _prompts(settings: Settings, file: Path, *, chat: bool) -> Prompts:
    """Read the prompts, and check what can be checked without weights."""
    from dyntree_plugin.commands.tune import heads, models

    context = models.context_of(settings.target)
    if settings.head is not None:
        if settings.pool > 1 or settings.adapter is not None:
            raise ValueError("--head goes without --pool and --adapter: all of one head is trained")
        heads.config_of(settings)
    elif settings.draft is None:
        raise ValueError("DRAFT is missing: give the draft model to begin with, or --head eagle3")
    else:
        models.check(settings.target, settings.draft)
        context = min(context, models.context_of(settings.draft))
    most = context - settings.tokens - max(settings.nodes) - 1
    if most < 1:
        raise ValueError(
            f"--tokens {settings.tokens} and --nodes {max(settings.nodes)} leave no room for a "
            f"prompt: the models read at most {context} tokens"
        )
    tokenizer = models.tokenizer_of(settings.target)
    return prompts.read(file, tokenizer, most, settings.held_out, settings.seed, chat=chat)
