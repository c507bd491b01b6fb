"""Images and videos in the prompts of these tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

FRAMES_PER_SECOND = 2


def prompt_of(tokens: list[int], images: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return vLLM's prompt of these tokens, which have a placeholder for each image and video.

    The pixels are noise. An image is (height, width, seed), a video (frames, height, width, seed).
    """
    prompt: dict[str, Any] = {"prompt_token_ids": tokens}
    if images:
        data: dict[str, list[Any]] = {}
        for *size, seed in images:
            pixels = np.random.default_rng(seed).integers(256, size=(*size, 3), dtype=np.uint8)
            video = len(size) == 3
            data.setdefault("video" if video else "image", []).append(
                (pixels, _metadata(len(pixels))) if video else _image(pixels)
            )
        prompt["multi_modal_data"] = data
    return prompt


def _image(pixels: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(pixels)


def _metadata(frames: int) -> dict[str, Any]:
    return {
        "fps": FRAMES_PER_SECOND,
        "total_num_frames": frames,
        "duration": frames / FRAMES_PER_SECOND,
        "frames_indices": [*range(frames)],
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
