"""Images whose tokens see each other both ways are not split between steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.scheduler import Scheduler

from dyntree_plugin.engine.scheduler import TreeScheduler

IMAGE = range(10, 30)
BUDGET = 100


def new_tokens(
    scheduler_type: type[Scheduler], computed: int, new: int, whole: bool, threshold: int = 0
) -> int:
    """Return how many of ``new`` tokens after ``computed`` ones a step takes of a prompt with an
    image. ``whole``: vLLM's option ``disable_chunked_mm_input``; ``threshold``: its
    ``long_prefill_token_threshold``."""
    scheduler: Any = object.__new__(scheduler_type)
    scheduler.scheduler_config = SimpleNamespace(
        disable_chunked_mm_input=whole, long_prefill_token_threshold=threshold
    )
    scheduler.max_num_scheduled_tokens = 64
    scheduler.is_encoder_decoder, scheduler.ec_connector = False, None
    scheduler.encoder_cache_manager = MagicMock()
    scheduler.encoder_cache_manager.get_cached_num_encoder_embeds.return_value = None
    place = PlaceholderRange(offset=IMAGE.start, length=len(IMAGE))
    image = MultiModalFeatureSpec(None, "image", "image", place)
    request: Any = SimpleNamespace(mm_features=[image], has_encoder_inputs=True)
    _, found, budget, *_ = scheduler._try_schedule_encoder_inputs(
        request, computed, new, BUDGET, shift_computed_tokens=0
    )
    assert budget == BUDGET  # The image is in the encoder's cache.
    return int(found)


@pytest.mark.parametrize(
    ("computed", "new", "taken", "of_vllm"),
    [
        (0, 9, 9, 9),
        (0, 15, 10, 10),
        (0, 30, 30, 30),
        (10, 19, 0, 19),  # The last chunk ended before the image.
        (10, 20, 20, 20),
        (17, 12, 0, 12),  # The prefix cache ends within the image.
        (17, 13, 13, 13),
        (29, 1, 1, 1),
        (30, 5, 5, 5),
    ],
)
def test_an_image_waits_for_a_step_that_has_room_for_the_rest_of_it(
    computed: int, new: int, taken: int, of_vllm: int
) -> None:
    """Control: if vLLM's scheduler no longer splits one, ours need not wait."""
    assert new_tokens(TreeScheduler, computed, new, whole=True) == taken
    assert new_tokens(Scheduler, computed, new, whole=True) == of_vllm
    assert new_tokens(TreeScheduler, computed, new, whole=False) == new


@pytest.mark.parametrize(("threshold", "taken"), [(20, 0), (19, 19), (0, 0)])
def test_an_image_that_no_step_has_room_for_does_not_wait(threshold: int, taken: int) -> None:
    assert new_tokens(TreeScheduler, 10, 19, whole=True, threshold=threshold) == taken
