"""What cannot be combined with trees if layers of the target have windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dyntree_plugin.admission.refusals import Refusal, dtype_of

_NOT_COMPARED = "not compared yet with decoding without trees"


def _with_windows(
    option: str, value: Callable[[Any], Any], refused: Callable[[Any], Any], advice: str
) -> Refusal:
    return Refusal(
        f"sliding_window, {option}",
        lambda c: (c.model_config.get_sliding_window(), value(c)),
        lambda found: found[0] is not None and refused(found[1]),
        f"{_NOT_COMPARED}; {advice}",
    )


WINDOW_REFUSALS = (
    _with_windows(
        "tensor_parallel_size",
        lambda c: c.parallel_config.tensor_parallel_size,
        lambda ranks: ranks > 1,
        "set it to 1",
    ),
    _with_windows(
        "pipeline_parallel_size",
        lambda c: c.parallel_config.pipeline_parallel_size,
        lambda stages: stages > 1,
        "set it to 1",
    ),
    _with_windows(
        "dtype",
        lambda c: dtype_of(c.model_config),
        lambda dtype: dtype == "float16",
        "set --dtype to bfloat16 or float32",
    ),
    _with_windows("enable_lora", lambda c: c.lora_config is not None, bool, "leave it out"),
)
"""Checks of ``VllmConfig``."""
