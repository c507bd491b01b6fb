"""A cache that trees on Hopper do not read with an indexer."""

from __future__ import annotations

import pytest
from configurations import admit, refusal_of, with_all
from test_table import read
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability


@pytest.mark.parametrize(
    ("major", "cache", "refused"),
    [(9, "fp8_e4m3", True), (9, "fp8", False), (10, "fp8_e4m3", False), (None, "fp8_e4m3", False)],
)
def test_a_cache_by_a_name_that_flashmla_does_not_read_is_refused_on_hopper(
    admitted: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    major: int | None,
    cache: str,
    refused: bool,
) -> None:
    capability = major and DeviceCapability(major, 0)
    monkeypatch.setattr(current_platform, "get_device_capability", lambda: capability)
    changes, *_ = read(f"latent half indexer cuda cache.cache_dtype={cache}")
    config = with_all(admitted, changes)
    if refused:
        assert "compute capability=(2048, ('fp8_e4m3', 9))" in refusal_of(config, "cuda")
    else:
        admit(config, "cuda")
