"""What cannot be combined with trees if the target has recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dyntree_plugin.admission.refusals import Refusal, dtype_of


def given(
    target: str,
    option: str,
    value: Callable[[Any], Any],
    refused: Callable[[Any], Any],
    advice: str,
) -> Refusal:
    """Return a check of ``VllmConfig`` for models whose configuration says ``target``."""
    return Refusal(
        f"{target}, {option}",
        lambda c: (getattr(c.model_config, target), value(c)),
        lambda found: found[0] and refused(found[1]),
        advice,
    )


_with_states = partial(given, "is_hybrid")

STATE_REFUSALS = (
    _with_states(
        "enable_prefix_caching",
        lambda c: c.cache_config.enable_prefix_caching,
        bool,
        "prefixes of recurrent states are not cached with trees; use --no-enable-prefix-caching",
    ),
    _with_states(
        "pipeline_parallel_size",
        lambda c: c.parallel_config.pipeline_parallel_size,
        lambda stages: stages > 1,
        "trees through the recurrent layers of a pipeline are not built yet; set it to 1",
    ),
    _with_states(
        "dtype",
        lambda c: dtype_of(c.model_config),
        lambda dtype: dtype == "float16",
        "not compared yet with decoding without trees; set --dtype to bfloat16 or float32",
    ),
    _with_states(
        "mamba_cache_dtype",
        lambda c: c.cache_config.mamba_cache_dtype,
        lambda dtype: dtype != "auto",
        "not compared yet with decoding without trees; leave it out",
    ),
    _with_states(
        "mamba_ssm_cache_dtype",
        lambda c: c.cache_config.mamba_ssm_cache_dtype,
        lambda dtype: dtype == "float16",
        "not compared yet with decoding without trees; set it to bfloat16 or float32",
    ),
    _with_states(
        "enable_lora",
        lambda c: c.lora_config is not None,
        bool,
        "not compared yet with decoding without trees; leave it out",
    ),
    Refusal(
        "use_replayssm",
        lambda c: c.cache_config.use_replayssm,
        bool,
        "an accepted path advances whole states; leave --use-replayssm out",
    ),
)
"""Checks of ``VllmConfig``."""
