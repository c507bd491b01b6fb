"""Complete the arguments of an engine, and explain errors of vLLM that come before there is a
configuration for `check.refuse_unserved`."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dyntree_plugin.admission import draft_methods
from dyntree_plugin.admission.check import Refused, unserved_method
from dyntree_plugin.admission.model_files import speculation_of, unreadable
from dyntree_plugin.options.methods import OF_TARGET, WITH_DRAFT
from dyntree_plugin.options.options import NAMESPACE, DynTreeOptions

_BUILT_BY = "create_speculative_config"
"""vLLM's function that reads a draft's configuration."""


def name_method(arguments: Any) -> str | None:
    """Give vLLM's ``EngineArgs`` the method that the file of a draft names, if the user gives none.

    Returns what was set, for the log; None if nothing was.

    Raises:
        Refused: if vLLM would take another method from the path of the draft.
    """
    given = {k: v for k, v in speculation_of(arguments).items() if v is not None}
    model = given.get("model", arguments.spec_model)
    method = given.get("method", arguments.spec_method)
    if not isinstance(model, str):
        return None
    found: dict[str, Any] = {}
    if method is None and (Path(model).is_dir() or "/" in model):
        found = draft_methods.of_file(_config_of(model, given.get("revision")) or {})
    named = found.get("method", method)
    taken = draft_methods.of_path(model)
    if taken not in (None, named) and (named == "draft_model" or _is_mtp(named)):
        raise Refused(
            f"speculative_config.model={model!r} is not supported with method {named!r}: vLLM "
            f"takes method {taken!r} from its path; use another path, or set method to {taken!r}"
        )
    if found.get("method") not in WITH_DRAFT:
        return None
    arguments.speculative_config = found | given
    return f"speculative_config: {found} follows from the config.json of {model}."


def refusals(arguments: Any, with_trees: bool, error: Exception) -> Iterator[str]:
    """Yield reasons in vLLM's ``EngineArgs`` for an ``error`` of vLLM."""
    for key, value in speculation_of(arguments).items():
        if key == NAMESPACE or key in DynTreeOptions.model_fields:
            given = value if key == NAMESPACE else {key: value}
            yield (
                f"speculative_config.{key}={value!r} is for {NAMESPACE}: give it as "
                f"--{NAMESPACE} '{json.dumps(given, default=str)}'"
            )
    if with_trees:
        yield from _adapters_exceed_step(arguments)
        # vLLM asks for Arctic Inference before it makes a configuration.
        if speculation_of(arguments).get("method") == "suffix":
            yield unserved_method("suffix")
        for reason in _draft_refusals(arguments, error):
            yield f"speculative_config.{reason}"


def _adapters_exceed_step(arguments: Any) -> Iterator[str]:
    """Say if a step is too small for vLLM's LoRA; vLLM has filled in the arguments' defaults."""
    limit, num_seqs = arguments.max_num_batched_tokens, arguments.max_num_seqs
    drafts = speculation_of(arguments).get("num_speculative_tokens")
    if not arguments.enable_lora or limit is None or num_seqs is None or drafts is None:
        return
    least = num_seqs * (drafts + 1)
    if limit < least:
        yield (
            f"max_num_batched_tokens={limit} is too small with enable_lora: vLLM asks for "
            f"max_num_seqs * (num_speculative_tokens + 1) = {num_seqs} * {drafts + 1} = {least}; "
            f"raise it to that, or lower max_num_seqs to at most {max(1, limit // (drafts + 1))}"
        )


def _draft_refusals(arguments: Any, error: Exception) -> Iterator[str]:
    """Yield at most one reason in the draft's method and files."""
    given = speculation_of(arguments)
    method, model = given.get("method"), given.get("model")
    if _is_mtp(method):
        method, model = "mtp", model or arguments.model
    if not isinstance(model, str) or method not in (None, *WITH_DRAFT):
        return
    if any(unreadable(arguments)):
        return  # `reasons.of_model_files` yields it.
    if reason := _draft_problem(model, method):
        yield reason
        return
    frames = traceback.extract_tb(error.__traceback__)
    if not any(frame.name == _BUILT_BY for frame in frames):
        return
    if method == "mtp" and isinstance(error, (NotImplementedError, ZeroDivisionError)):
        yield (
            f"method='mtp' is not supported with {model!r}: vLLM finds no module of multi-token "
            "prediction in its config.json; use a draft model, or look-up"
        )
    elif "Model architectures" in str(error):
        config = _config_of(model, given.get("revision")) or {}
        yield (
            f"method={method!r} is not supported with {model!r}: vLLM has no such draft for "
            f"architectures={config.get('architectures')!r}"
            + ("; for a whole model set method to 'draft_model'" if method in OF_TARGET else "")
        )
    elif not isinstance(error, (ValueError, OSError, ImportError)):
        yield (
            f"model={model!r} is not supported: vLLM cannot read its files "
            f"({type(error).__name__}: {error}); get the draft again"
        )


def _draft_problem(model: str, method: str | None) -> str | None:
    """Say what is wrong with the files of a draft, or that they are for another method; None if
    nothing is, or they are not on this machine."""
    folder = Path(model)
    file = folder / "config.json"
    if not folder.is_dir():
        missing = model.startswith(("/", ".", "~")) and not folder.exists()
        return f"model={model!r} is not a folder; name that of the draft" if missing else None
    if not file.is_file():
        other = (folder / "params.json").is_file()  # Mistral's
        return None if other else f"model={model!r} has no config.json; name the draft's folder"
    config = json.loads(file.read_bytes())
    if (unknown := draft_methods.speculators_refusal(config)) is not None:
        return f"model={model!r}: {unknown}"
    own = draft_methods.of_file(config).get("method")
    if method is None or own in (None, method):
        return None
    return f"method={method!r} does not go with the draft {model!r}: set method to {own!r}"


def _config_of(model: str, revision: str | None) -> dict[str, Any] | None:
    """Return the content of a model's ``config.json``, which is fetched as vLLM would; None if
    there is none, or if it is not a JSON object."""
    import huggingface_hub
    from transformers import PreTrainedConfig

    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    try:
        found, _ = PreTrainedConfig.get_config_dict(
            model, revision=revision, local_files_only=offline
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # vLLM, which reads it next, says why.
    return found


def _is_mtp(method: object) -> bool:
    """Return whether vLLM takes a method for ``mtp``, under one of its older names too."""
    return isinstance(method, str) and method.endswith("mtp")
