"""What an error names, and who shows it to the user."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from pydantic import ValidationError

from dyntree_plugin.admission.check import Refused
from dyntree_plugin.escape import escaped

MISTAKES = (ValueError, NotImplementedError, OSError)
"""What vLLM and dyntree raise for what a user asked for."""

_shown = ContextVar("reasons are shown by the command that runs", default=False)


def of(error: Exception) -> list[str]:
    """Each thing that an error of vLLM's check or of ours names."""
    if isinstance(error, Refused):
        return list(map(str, error.args))
    if not isinstance(error, ValidationError):
        return [str(error)]
    found = []
    for each in error.errors():
        cause = each.get("ctx", {}).get("error")
        told = each["msg"].removeprefix("Value error, ")
        where = "".join(f"{part}: " for part in each["loc"])
        found += of(cause) if isinstance(cause, Refused) else [where + told]
    return found


def are_ours(error: Exception) -> bool:
    """Whether it is, or vLLM has wrapped, a refusal of ours."""
    if not isinstance(error, ValidationError):
        return isinstance(error, Refused)
    causes = (each.get("ctx", {}).get("error") for each in error.errors())
    return any(isinstance(cause, Refused) for cause in causes)


@contextmanager
def logged() -> Iterator[None]:
    """Logs what a ValueError names, a line for each: vLLM shows it as the middle of a traceback.

    Not where the command that runs shows it itself.
    """
    from vllm.logger import init_logger

    try:
        yield
    except ValueError as error:
        if not _shown.get():
            for reason in of(error):
                # vLLM shows only what is logged below the name of its own package.
                init_logger("vllm.dyntree").error("dyntree: %s", reason)
        raise


@contextmanager
def shown() -> Iterator[None]:
    """Nothing is `logged` within: the caller shows what is raised."""
    token = _shown.set(True)
    try:
        yield
    finally:
        _shown.reset(token)


@contextmanager
def told_by(command: str, told: Callable[[Exception], bool] = lambda error: True) -> Iterator[None]:
    """Ends the process with status 2 and a line on stderr for each thing that a user's mistake
    names. ``told``: of which errors; others are raised."""
    try:
        with shown():
            yield
    except MISTAKES as error:
        if not told(error):
            raise
        for reason in of(error):
            said = escaped(" ".join(reason.split()))
            print(f"{command}: {said}", file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from None
