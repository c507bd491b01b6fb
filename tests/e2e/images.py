"""Images in the prompts of these tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def prompt_of(tokens: list[int], images: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return vLLM's prompt of these tokens, with an image of noise for each (height, width, seed).

    The tokens have one placeholder for each image.
    """
    prompt: dict[str, Any] = {"prompt_token_ids": tokens}
    if images:
        prompt["multi_modal_data"] = {"image": [_noise(*each) for each in images]}
    return prompt


def _noise(height: int, width: int, seed: int) -> Any:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
