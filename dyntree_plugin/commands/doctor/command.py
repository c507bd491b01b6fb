"""`dyntree doctor`: check this machine, and what dyntree would refuse of a command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TextIO

from dyntree_plugin.admission import versions
from dyntree_plugin.commands.doctor.checks import companions, device_type, machine_checks, memory
from dyntree_plugin.commands.doctor.report import Check, failures, show, write_json
from dyntree_plugin.commands.start import quiet


def run(command: Sequence[str], *, build_kernels: bool, as_json: bool, verbose: bool) -> int:
    """Run the checks and show them; return the exit status, which is 1 if a check fails.

    ``command`` are arguments of ``dyntree serve``. Without them only the machine is checked.
    """
    with os.fdopen(os.dup(2), "w") as screen, nullcontext() if verbose else quiet():
        tell = _teller(screen)
        checks = []
        for check in _checks(command, build_kernels, tell):
            checks.append(check)
            tell(f"{check.name}: {check.status}")
        tell("")
    if as_json:
        write_json(checks)
    else:
        show(checks, with_command=bool(command))
    return 1 if failures(checks) else 0


def _checks(
    command: Sequence[str], build_kernels: bool, tell: Callable[[str], None]
) -> Iterator[Check]:
    yield from machine_checks()
    if versions.installed_vllm() is None:
        return
    check = companions()
    yield check
    if check.status == "fail":  # Then vLLM cannot be imported.
        return
    from dyntree_plugin.commands.doctor import command_line, kernels

    config = None
    if command:
        checks, config = command_line.command_line_checks(command)
        yield from checks
    else:
        yield kernels.attention()
        if device_type() == "cpu":
            yield kernels.layout()
            yield _default_memory()
    refused = bool(command) and config is None
    if build_kernels and not refused:
        yield from kernels.build(*command_line.variants(config), command_line.xqa(config), tell)


def _default_memory() -> Check:
    from vllm import EngineArgs

    # A command line may ask for less memory.
    return replace(memory(EngineArgs.gpu_memory_utilization), status="ok")


def _teller(screen: TextIO) -> Callable[[str], None]:
    """Return a function that shows one line of progress at a time, on a terminal only."""

    def tell(line: str) -> None:
        if screen.isatty():
            screen.write(f"\r\033[K{line}")
            screen.flush()

    return tell
