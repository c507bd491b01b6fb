"""Mark tests of some engines as slow."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def marked(parameters: Iterable[Any], slow: Container[str]) -> list[Any]:
    """Return the parameters of a test, with a mark on those of engines that are slow.

    A parameter is an engine, or a tuple that begins with it.
    """

    def one(parameter: Any) -> Any:
        values = parameter if isinstance(parameter, tuple) else (parameter,)
        marks = pytest.mark.slow if values[0] in slow else ()
        return pytest.param(*values, marks=marks)

    return [one(parameter) for parameter in parameters]
