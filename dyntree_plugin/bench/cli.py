"""``dyntree bench``: what is measured and how; each command loads its own room when it runs."""

from __future__ import annotations

from importlib import import_module

import typer

from dyntree_plugin import preload
from dyntree_plugin.ready import ready_for_engine

app = typer.Typer(
    no_args_is_help=True,
    help="Measure acceptance and speed; writes JSON with provenance.",
)

_OWN_ARGUMENTS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""For commands that read their arguments themselves."""


@app.command(context_settings=_OWN_ARGUMENTS)
def serve(context: typer.Context) -> None:
    """Speed in the engine, of no speculation, vLLM's chains and trees; or of running servers."""
    ready_for_engine(context.args)
    import_module("dyntree_plugin.bench.serve.command").main(context.args)


@app.command(context_settings=_OWN_ARGUMENTS)
def acceptance(context: typer.Context) -> None:
    """Tokens per step of every growth with every rule it is exact with, without the engine."""
    preload.restart_with_library()
    import_module("dyntree_plugin.bench.acceptance.command").main(context.args)
