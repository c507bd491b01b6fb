"""Ways to break how tokens of an image see each other both ways, on CUDA."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from dyntree_plugin.engine.attention import cuda_layers


def images_one_way(runner: Any) -> AbstractContextManager[Any]:
    """Let tokens of an image see only those before them."""
    from vllm.v1.attention.backends import triton_attn

    return mock.patch.object(triton_attn, "compute_mm_prefix_range_tensor", return_value=None)


def short_images_as_chains(runner: Any) -> AbstractContextManager[Any]:
    """Take rows of images for a chain where they are no more than those of a tree."""
    return mock.patch.object(cuda_layers, "_has_images", return_value=False)


def both_ways_in_full_attention(runner: Any) -> AbstractContextManager[Any]:
    """Hide the places of images from Gemma-4, which leaves them to layers with windows."""
    hidden = property(lambda metadata: None, lambda metadata, ranges: None)
    return mock.patch.object(cuda_layers.TreeAttentionMetadata, "mm_prefix_range_tensor", hidden)


def images_split(runner: Any) -> AbstractContextManager[Any]:
    """Split images that a chunk begins with, as vLLM does."""
    from dyntree_plugin.engine import scheduler

    return mock.patch.object(scheduler, "_end", return_value=0)


BROKEN = (
    images_one_way,
    short_images_as_chains,
    both_ways_in_full_attention,
    images_split,
)
