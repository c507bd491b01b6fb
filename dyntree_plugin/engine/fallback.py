"""Tell whether requests are drafted with chains instead of trees, and why."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from vllm.v1.worker.gpu.sample.logits_processor.loader import (
    LOGITSPROCS_GROUP,
    _cached_load_v2_logitsprocs,
)

from dyntree_plugin.metrics.names import LOGITS_PROCESSORS

if TYPE_CHECKING:
    from vllm.config import ModelConfig

    from dyntree_plugin.tree.shape import TreeShape

MAX_CHUNK_BYTES = 1 << 30
"""The sampler copies logits to fp32; this bounds the copy, as vLLM bounds its own."""


def has_custom_processors(model_config: ModelConfig) -> bool:
    """Return whether the sampler runs logits processors of the configuration or of packages."""
    return bool(_cached_load_v2_logitsprocs(tuple(model_config.logits_processors or ())))


def chain_bytes(model_config: ModelConfig, shape: TreeShape) -> int:
    """Return the bytes of one request's logits if every row of its tree is a separate chain."""
    rows = (shape.node_budget + 1) * (shape.max_depth + 1)
    return 4 * rows * int(model_config.get_vocab_size())


def chain_reason(model_config: ModelConfig, shape: TreeShape) -> str | None:
    """Return why requests are drafted with chains, or None if they have trees.

    Custom logits processors read the preceding rows as the preceding tokens. So every row of a tree
    is given to them as a separate chain, unless that would take too much memory.
    """
    too_large = chain_bytes(model_config, shape) > MAX_CHUNK_BYTES
    return LOGITS_PROCESSORS if too_large and has_custom_processors(model_config) else None


def default_chain_reasons(model_config: ModelConfig, shape: TreeShape) -> Iterator[tuple[str, str]]:
    """Find what makes every request a chain by default, and what to do about it.

    Raises:
        ValueError: if a logits processor cannot be loaded.
    """
    try:
        reason = chain_reason(model_config, shape)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if reason is not None:
        given = [f"--logits-processors {each}" for each in model_config.logits_processors or ()]
        installed = [f"installed {e.value}" for e in entry_points(group=LOGITSPROCS_GROUP)]
        needed, limit = chain_bytes(model_config, shape) >> 20, MAX_CHUNK_BYTES >> 20
        yield (
            f"Logits processors ({', '.join([*given, *installed])}) read the preceding tokens, "
            f"and for trees of {shape.node_budget} nodes and depth {shape.max_depth} their rows "
            f"would take {needed} MiB per request, more than {limit} MiB: every request is drafted "
            "with a chain, not with a tree",
            "leave them out, or lower dyntree.node_budget or dyntree.max_depth",
        )
