"""What vLLM and Transformers fail on in the files of a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dyntree_plugin.options.options import NAMESPACE


def speculation_of(arguments: Any) -> Mapping[str, Any]:
    """Return the speculation in vLLM's ``EngineArgs``, empty if it is none."""
    given = arguments.speculative_config
    return given if isinstance(given, Mapping) else {}


def models_of(arguments: Any) -> list[tuple[str, str]]:
    """Return the options of vLLM's ``EngineArgs`` that name models, with the names."""
    given = (arguments.additional_config or {}).get(NAMESPACE)
    drafts = given.get("drafts") if isinstance(given, Mapping) else None
    named = [("model", arguments.model)]
    named += [("speculative_config.model", speculation_of(arguments).get("model"))]
    named += [(f"{NAMESPACE}.drafts", each) for each in drafts or ()]
    return [(option, model) for option, model in named if isinstance(model, str)]


def unreadable(arguments: Any) -> Iterator[str]:
    """Yield reasons in vLLM's ``EngineArgs``: models whose config.json is not a JSON object."""
    speculation = arguments.speculative_config
    if not isinstance(speculation, Mapping | None):
        yield f"speculative_config={speculation!r} must be a JSON object"
    for option, model in models_of(arguments):
        if problem := problem_of(model):
            yield f"{option}={model!r} cannot be read: {problem}"


def nonpositive_sizes(model_config: Any) -> dict[str, int]:
    """Return the sizes of a ``ModelConfig`` that are not above 0, which config.json may have."""
    sizes = {
        "vocab_size": model_config.get_vocab_size(),
        "hidden_size": model_config.get_hidden_size(),
        "num_hidden_layers": model_config.get_total_num_hidden_layers(),
        "kv_heads": model_config.get_total_num_kv_heads(),
        "head_dim": model_config.get_head_size(),
    }
    if model_config.runner_type == "draft":  # vLLM counts 0 layers of modules that have one.
        del sizes["num_hidden_layers"]
    return {name: size for name, size in sizes.items() if size < 1}


def problem_of(model: str) -> str | None:
    """Return why the config.json in a model's folder is no JSON object, or None."""
    file = Path(model) / "config.json"
    try:
        if not file.is_file():
            return None  # vLLM says so.
        found = json.loads(file.read_bytes())
    except OSError as error:
        return f"its config.json cannot be opened: {error.strerror}"
    except RecursionError:
        return "its config.json is nested too deeply"
    except ValueError as error:
        return f"its config.json is not JSON: {error}"
    return None if isinstance(found, dict) else "its config.json must be a JSON object"
