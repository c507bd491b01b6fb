"""Over which series the panels sum."""

from __future__ import annotations

from formulas import Scope
from page import SELECTOR

HERE = Scope(SELECTOR, "$__rate_interval", ())
"""All that is chosen, together."""

BY_MODEL = HERE.per("model_name")
BY_ENGINE = BY_MODEL.per("job", "instance", "engine")

SPEED = (
    "How much faster the target decodes with trees than alone, as estimated: the time of the "
    "stages of steps in which every request decoded, against the time that plain steps of as many "
    "requests behind as much context would take for the same tokens. These are interpolated "
    "between plain steps (target forward and greedy sampling) that were measured before the "
    "engine served, and corrected by what the target's forwards take since; no plain step counts "
    "for more than the target took in the step itself. While measurement and forwards disagree, "
    "nothing is shown. What vLLM spends around the worker's stages is left out, of both. Below 1 "
    "the tree does not pay."
)
