"""dyntree on vLLM's command line: ``--dyntree``, and ``--additional-config`` beside it."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from typing import Any

from dyntree_plugin.options.options import NAMESPACE, DynTreeOptions
from dyntree_plugin.strict_json import from_json


def has_options(additional_config: object) -> bool:
    """Return whether a value of ``--additional-config`` has dyntree options."""
    return isinstance(additional_config, Mapping) and NAMESPACE in additional_config


def json_object(text: str) -> dict[str, Any]:
    """Read the value of ``--dyntree``; an empty one asks for every default.

    Raises:
        argparse.ArgumentTypeError: if it is not a JSON object of valid options.
    """
    try:
        # vLLM hands on an empty `dyntree:` of a --config file as None.
        value = {} if text in ("None", "") else from_json(text)
    except ValueError as error:
        example = "an example is '{\"node_budget\": 16}'"
        raise argparse.ArgumentTypeError(f"{error}; {example}") from None
    try:
        DynTreeOptions.parse(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return dict(value)


def single_keys(stock: Any) -> Callable[[str], Any]:
    """Refuse equal keys in an ``--additional-config`` that has dyntree options.

    vLLM's reader, ``stock``, takes the last of two equal keys.
    """

    @functools.wraps(stock)
    def read(text: str) -> Any:
        try:
            value = stock(text)
        except RecursionError:
            value = {NAMESPACE: text}  # `from_json` raises the error.
        if has_options(value):
            try:
                from_json(text)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return read


def merge_options(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the options of both.

    Raises:
        ValueError: if an option has two different values.
    """
    for name in first.keys() & second.keys():
        if first[name] != second[name]:
            raise ValueError(
                f"{NAMESPACE}.{name} is given twice, as {first[name]!r} and as {second[name]!r}: "
                "give it once"
            )
    return {**first, **second}


def _merge(action: argparse.Action, first: Any, second: Any) -> Any:
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        return second
    try:
        return merge_options(first, second)
    except ValueError as error:
        raise argparse.ArgumentError(action, str(error)) from None


class OptionsAction(argparse.Action):
    """Merges its options into those that the namespace's ``additional_config`` already has."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        config = dict(getattr(namespace, self.dest, None) or {})
        config[NAMESPACE] = _merge(self, config.get(NAMESPACE), values)
        setattr(namespace, self.dest, config)


def keeping_options(stock: Any) -> type[argparse.Action]:
    """Derive an action of vLLM's ``--additional-config`` that keeps earlier dyntree options.

    In vLLM a second ``--additional-config`` replaces the first, and so does every dotted argument,
    such as ``--additional-config.x``.
    """

    def __call__(
        self: argparse.Action,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        earlier = getattr(namespace, self.dest, None) or {}
        if NAMESPACE in earlier and isinstance(values, Mapping):
            merged = _merge(self, earlier[NAMESPACE], values.get(NAMESPACE, {}))
            values = {**values, NAMESPACE: merged}
        stock.__call__(self, parser, namespace, values, option_string)

    return type(f"KeepingOptions{stock.__name__}", (stock,), {"__call__": __call__})
