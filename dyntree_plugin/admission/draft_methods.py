"""For which of vLLM's methods a draft is, by its ``config.json``.

vLLM looks for some methods in the path of a draft, and takes all others for draft models. This
module imports nothing of vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

_OF_ARCHITECTURES = {
    "eagle3": re.compile(r"Eagle3|^P[Ee]agle"),
    "dflash": re.compile(r"^DFlash|^LiLiCorr|^MuseGlimmerAssistant"),
    "dspark": re.compile(r"DSpark"),
    "eagle": re.compile(r"^Eagle(?!2_5_VL)"),
    "mtp": re.compile(r"MTP"),
    "medusa": re.compile(r"^Medusa"),
    "extract_hidden_states": re.compile(r"^ExtractHiddenStates"),
}
"""What vLLM's names of classes of drafts have, by method; the first that matches counts."""

_OF_SPECULATORS: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "dflash": {"method": "dflash"},
    "dflash2": {"method": "dflash"},
    "dspark": {"method": "dspark"},
}
"""Options of the drafts of the library speculators, by their ``speculators_model_type``."""

_IN_PATHS = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""What vLLM looks for in the path of a draft, in this order, and the method that it then takes."""

OVER_PATH = frozenset(_IN_PATHS.values())
"""The methods that vLLM takes from the user whatever the path of the draft is."""


def of_architectures(names: object) -> str | None:
    """Return the method of drafts of these classes; None for whole models."""
    if not isinstance(names, Collection):
        return None
    texts = [each for each in names if isinstance(each, str)]
    of_any = ((method, pattern) for method, pattern in _OF_ARCHITECTURES.items())
    return next((m for m, pattern in of_any if any(map(pattern.search, texts))), None)


def of_file(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a speculation that a ``config.json`` asks for; none if it has the
    classes of a whole model, as some EAGLE heads have."""
    if (kind := speculators_type(config)) is not None:
        return _OF_SPECULATORS.get(kind, {})
    method = of_architectures(config.get("architectures"))
    return {} if method is None else {"method": method}


def speculators_type(config: Mapping[str, Any]) -> str | None:
    """Return the kind of a draft of the library speculators; None for others."""
    kind = config.get("speculators_model_type")
    return None if kind is None and not config.get("speculators_config") else str(kind)


def speculators_refusal(config: Mapping[str, Any]) -> str | None:
    """Say that vLLM does not know a draft of the library speculators; None if it does."""
    kind = speculators_type(config)
    if kind is None or kind in _OF_SPECULATORS:
        return None
    return f"speculators_model_type={kind!r} must be one of {', '.join(_OF_SPECULATORS)}"


def of_path(model: str) -> str | None:
    """Return the method that vLLM takes from a draft's path, unless one of `OVER_PATH` is given."""
    return next((m for text, m in _IN_PATHS.items() if text in model.lower()), None)


def mismatch(method: str, architectures: object) -> str | None:
    """Say that a draft of these classes is for another method; None if it may be for this one."""
    own = of_architectures(architectures)
    if own is None or own == method:
        return None
    return (
        f"method={method!r} does not go with the draft's architectures={architectures!r}: "
        f"set method to {own!r}"
    )
