"""Quantised KV caches: the tokens are those of the engine without trees and with such a cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import workload
from comparison import accepted_per_step
from engine_process import Run
from random_engines import NODES, REQUESTS, RUN, Engines, Target
from random_targets import with_cache_scales
from sabotage_of_caches import BROKEN

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not torch.cpu._is_avx512_supported(), reason="vLLM quantises caches with AVX-512 alone"
    ),
]

HALF = {"dtype": "bfloat16"}


def _engines(model: str) -> Engines:
    """Arguments and runs by name. With scales in the checkpoint, vLLM quantises the cache."""
    plain, draft = workload.without_tree(), workload.tree(NODES)
    broken = {each.__name__: Run(REQUESTS, sabotage=each.__name__) for each in BROKEN}
    sound, of = {"sound": RUN}, {"model": model}
    return {
        "plain": (plain | of, sound),
        "unquantised": (plain | of | {"kv_cache_dtype": "bfloat16"} | HALF, sound),
        "draft": (draft | of, sound | broken),
        "plain in bfloat16": (plain | of | HALF | {"max_logprobs": -1}, sound),
        "draft in bfloat16": (draft | of | HALF, sound | broken),
    }


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target with windows in every second layer."""
    folder = tmp_path_factory.mktemp("targets") / "gemma3_text"
    return Target(_engines(str(with_cache_scales(folder, "gemma3_text", 0.02, 0.05))))


def test_no_token_differs(target: Target) -> None:
    assert target.differing("draft", "sound") == 0
    assert accepted_per_step(target.served("draft")["sound"]) > 0.5


@pytest.mark.parametrize("name", [each.__name__ for each in BROKEN])
def test_tokens_differ_if_a_mechanism_is_broken(name: str, target: Target) -> None:
    assert target.differing("draft", name)


@pytest.mark.slow
def test_in_bfloat16_tokens_differ_by_rounding_alone(
    target: Target, tell: Callable[[str], None]
) -> None:
    judged = target.in_bfloat16()
    tell(f"quantised cache in bfloat16: {judged}")
    assert judged.unexcused == 0
    assert judged.excused <= len(REQUESTS) // 5
    for each in BROKEN:
        found = target.differing("draft in bfloat16", each.__name__, "plain in bfloat16")
        assert found > judged.excused
    assert target.differing("unquantised", "sound", "plain in bfloat16") > judged.excused
