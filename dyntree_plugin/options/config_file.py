"""The YAML file of ``--config``, which vLLM reads into arguments."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from dyntree_plugin.secrets import hidden


def check(arguments: Sequence[str]) -> None:
    """Refuse a file that vLLM fails on or overlooks, or that has a key twice.

    ``arguments``: those of ``vllm serve``.

    Raises:
        ValueError: naming the file and what is wrong in it.
    """
    for each in arguments:
        if each.startswith("--config="):  # vLLM would read no file, and say nothing.
            raise ValueError(f"{each!r}: write --config and the file as two words")
    if "--config" not in arguments:
        return
    path, *further = arguments[arguments.index("--config") + 1 :] or [""]
    if not path or "--config" in further:
        raise ValueError("--config must be given once, and be followed by a YAML file")
    try:
        _check(_read(path))
        if not path.endswith((".yaml", ".yml")):
            raise ValueError("must end in .yaml or .yml")
    except ValueError as error:
        raise ValueError(f"--config {path!r} {' '.join(str(error).split())}") from None


def _read(path: str) -> Any:
    import yaml  # type: ignore[import-untyped]

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            keys = [
                self.construct_object(key, deep=True)
                for key, _ in node.value
                if key.tag != "tag:yaml.org,2002:merge"
            ]
            twice = next((key for at, key in enumerate(keys) if key in keys[:at]), None)
            if twice is not None:
                raise ValueError(f"has the key {twice!r} twice: give it once")
            found: dict[Hashable, Any] = super().construct_mapping(node, deep)
            return found

    try:
        return yaml.load(Path(path).read_text(), Loader)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML: {hidden(str(error))}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: {error}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _check(content: Any) -> None:
    if not isinstance(content, dict):
        what = "is empty" if content is None else "is no mapping"
        raise ValueError(f"{what}: give arguments, one a line, such as 'max-num-seqs: 4'")
    for key, value in content.items():
        if not isinstance(key, str):
            raise ValueError(f"has the key {key!r}, which must be the name of an argument")
        if not isinstance(value, dict):
            continue
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"has under {key!r} what JSON cannot hold: {error}") from None
