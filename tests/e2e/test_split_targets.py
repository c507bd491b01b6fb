"""Targets with windows, sinks, quantised caches or latent attention, on two ranks and two stages.

The tokens are those of the engine without trees on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import workload
from comparison import accepted_per_step
from engine_process import Run
from latent_targets import latent_target
from random_engines import NODES, REQUESTS, RUN, Engines, Target
from random_targets import random_target, with_cache_scales

pytestmark = pytest.mark.e2e

KINDS = ("gemma2", "gpt_oss", "quantised", "deepseek_v2")
SPLIT = {"two ranks": "without_kv_move", "two stages": "without_paths_of_earlier_stages"}
"""Engines, and how one of their parts is broken."""
FAST = ("two ranks", "gpt_oss")
"""Sinks are split over the ranks as heads are."""


def _target(folder: Path, kind: str) -> Path:
    if kind == "quantised":
        if not torch.cpu._is_avx512_supported():
            pytest.skip("vLLM quantises caches with AVX-512 alone")
        return with_cache_scales(folder, "gemma3_text", 0.02, 0.05)
    return (latent_target if kind == "deepseek_v2" else random_target)(folder, kind)


def _engines(model: str, kind: str) -> Engines:
    of = {"model": model}
    trees = workload.tree(NODES, lookup="off") | of
    if kind == "deepseek_v2":  # vLLM's blocks suit no draft with other attention
        trees["speculative_config"] = {**trees["speculative_config"], "model": model}
    split = {
        name: (trees, {"sound": RUN, "broken": Run(REQUESTS, sabotage=broken)})
        for name, broken in SPLIT.items()
    }
    return {"plain": (workload.without_tree() | of, {"sound": RUN}), **split}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    @cache
    def of_kind(kind: str) -> Target:
        folder = _target(tmp_path_factory.mktemp("targets") / kind, kind)
        return Target(_engines(str(folder), kind))

    return of_kind


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        pytest.param(engine, kind, marks=() if (engine, kind) == FAST else pytest.mark.slow)
        for engine in SPLIT
        for kind in KINDS
    ],
)
def test_no_token_differs_unless_a_part_is_broken(
    engine: str, kind: str, target: Callable[[str], Target]
) -> None:
    own = target(kind)
    assert own.differing(engine, "sound") == 0
    assert own.differing(engine, "broken") > 0
    assert accepted_per_step(own.served(engine)["sound"]) > 0.5
