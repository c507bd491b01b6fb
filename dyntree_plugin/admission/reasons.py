"""Get the reasons of an error, and show each of them to the user once."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from pydantic import ValidationError

from dyntree_plugin.admission.check import Refused
from dyntree_plugin.admission.model_files import models_of, unreadable
from dyntree_plugin.escape import escaped
from dyntree_plugin.secrets import hidden

MISTAKES = (ValueError, NotImplementedError, OSError)
"""Exceptions that vLLM and dyntree raise for a user's mistake."""

_READING = (
    "transformers", "vllm.transformers_utils", "vllm.config.model", "vllm.config.speculative",
)  # fmt: skip
"""Modules that read a config.json, and those below them."""
_PATCHES = "dyntree_plugin.engine.patches"
"""The module whose functions stand in for vLLM's, and call these."""

_not_logged = ContextVar("the running command shows the reasons itself", default=False)


def of(error: Exception) -> list[str]:
    """Return each reason that an error of vLLM or of dyntree names, without secrets."""
    if isinstance(error, Refused):
        return [hidden(str(each)) for each in error.args]
    if not isinstance(error, ValidationError):
        return [hidden(str(error))]
    reasons: list[str] = []
    for each in error.errors():
        cause = each.get("ctx", {}).get("error")
        message = each["msg"].removeprefix("Value error, ")
        where = "".join(f"{part}: " for part in each["loc"])
        reasons += of(cause) if isinstance(cause, Refused) else [hidden(where + message)]
    return reasons


def of_model_files(arguments: Any, error: Exception) -> list[str]:
    """Return reasons in the models' files for an error that ``arguments`` of an engine led to.

    An error that is neither a user's mistake nor ours, and comes from where vLLM or Transformers
    read a config.json, is taken to come from what the file has.
    """
    found = list(unreadable(arguments))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    read = any(each.startswith(_READING) for each in modules)
    ours = any(each.startswith("dyntree_plugin.") and each != _PATCHES for each in modules)
    if found or ours or not read or isinstance(error, (*MISTAKES, ImportError)):
        return found
    models = " and ".join(repr(model) for _, model in models_of(arguments))
    return [
        f"vLLM cannot read the configuration of {models}: {type(error).__name__}: "
        f"{hidden(str(error))}"
    ]


def is_refusal(error: Exception) -> bool:
    """Return whether an error is a `Refused`, also if vLLM has wrapped it."""
    if not isinstance(error, ValidationError):
        return isinstance(error, Refused)
    causes = (each.get("ctx", {}).get("error") for each in error.errors())
    return any(isinstance(cause, Refused) for cause in causes)


@contextmanager
def logged() -> Iterator[None]:
    """Log each reason of a ValueError on a line; vLLM shows them in the middle of a traceback.

    Nothing is logged if the running command shows the reasons itself.
    """
    from vllm.logger import init_logger

    try:
        yield
    except ValueError as error:
        if not _not_logged.get():
            for reason in of(error):
                # vLLM shows only loggers below the name of its package.
                init_logger("vllm.dyntree").error("dyntree: %s", reason)
        raise


@contextmanager
def not_logged() -> Iterator[None]:
    """Keep `logged` from logging: the caller shows the error itself."""
    token = _not_logged.set(True)
    try:
        yield
    finally:
        _not_logged.reset(token)


@contextmanager
def exit_on_mistake(
    command: str, is_mistake: Callable[[Exception], bool] = lambda error: True
) -> Iterator[None]:
    """End the process on a user's mistake: status 2, and a line on stderr for each reason.

    ``is_mistake``: whether one of the `MISTAKES` is the user's; others are raised.
    """
    try:
        with not_logged():
            yield
    except MISTAKES as error:
        if not is_mistake(error):
            raise
        for reason in of(error):
            line = escaped(" ".join(reason.split()))
            print(f"{command}: {line}", file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from None
