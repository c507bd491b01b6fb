"""Speed against vLLM's own plain decoding in the same run, with room for a noisy machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import speed

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def speeds() -> dict[int, speed.Speed]:
    return speed.measure()


def test_where_the_time_goes_is_printed(
    speeds: dict[int, speed.Speed], tell: Callable[[str], None]
) -> None:
    text = speed.report(speeds)
    tell(text)
    assert "machinery" in text


@pytest.mark.parametrize("batch", speed.BATCHES)
def test_plain_decode_with_our_kernels_is_near_the_v1_runner(
    batch: int, speeds: dict[int, speed.Speed]
) -> None:
    assert speeds[batch].v2 <= 2 * 1.3 * speeds[batch].v1


@pytest.mark.parametrize("batch", speed.BATCHES)
def test_the_machinery_of_a_step_costs_no_more_than_a_few_plain_steps(
    batch: int, speeds: dict[int, speed.Speed]
) -> None:
    """The pair is so small that a plain step is mostly vLLM's own overhead: a measure of how fast
    this machine runs Python and small operators. On the reference machine it is 2.5 of them."""
    assert speeds[batch].machinery <= 4 * speeds[batch].v1
