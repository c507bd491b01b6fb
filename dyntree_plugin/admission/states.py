"""What cannot be combined with trees if the target has recurrent layers."""

from __future__ import annotations

from dyntree_plugin.admission.refusals import Refusal

STATE_REFUSALS = (
    Refusal(
        "is_hybrid, enable_prefix_caching",
        lambda c: (c.model_config.is_hybrid, c.cache_config.enable_prefix_caching),
        all,
        "prefixes of recurrent states are not cached with trees; use --no-enable-prefix-caching",
    ),
    Refusal(
        "is_hybrid, pipeline_parallel_size",
        lambda c: (c.model_config.is_hybrid, c.parallel_config.pipeline_parallel_size),
        lambda found: found[0] and found[1] > 1,
        "trees through the recurrent layers of a pipeline are not built yet; set it to 1",
    ),
    Refusal(
        "use_replayssm",
        lambda c: c.cache_config.use_replayssm,
        bool,
        "an accepted path advances whole states; leave --use-replayssm out",
    ),
)
"""Checks of ``VllmConfig``."""
