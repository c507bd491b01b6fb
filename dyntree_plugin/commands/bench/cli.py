"""``dyntree bench``: each command loads its own modules when it runs."""

from __future__ import annotations

from importlib import import_module

import typer

from dyntree_plugin.commands.start import ready_for_engine

app = typer.Typer(no_args_is_help=True, help="Measure speed, and write JSON with provenance.")


@app.callback()
def _commands() -> None:
    pass


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def serve(context: typer.Context) -> None:
    """Compare the speed of no speculation, vLLM's chains and trees, or of running servers."""
    ready_for_engine(context.args)
    import_module("dyntree_plugin.commands.bench.command").main(context.args)
