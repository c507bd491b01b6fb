"""Targets whose positions have three components (M-RoPE): the tokens are those of the engine
without trees, with images in the prompts and without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import sabotage_of_positions
import workload
from comparison import accepted_per_step, by_request, explain, mismatches
from engine_process import Request, Result, Run
from features import PROMPTS, SEEDS
from image_engine import serve
from vision_targets import IMAGE, vision_target

pytestmark = pytest.mark.e2e

NODES = 8
FEW = [300, 301, 302]
"""Random weights repeat nothing. Of so few tokens, look-up and a draft guess many."""
SIZES = [(56, 84), (112, 112), (28, 140), (84, 28)]
"""Height and width of images, of which 28 x 28 pixels take one token."""


def _request(number: int) -> Request:
    """None, one or two images, between texts or before one; three temperatures."""
    temperature = (0, 0.7, 1)[number // 3 % 3]
    params = {"temperature": temperature, "max_tokens": 32, "allowed_token_ids": FEW}
    seed = {"seed": SEEDS[number]} if temperature else {}
    images = [(*SIZES[(number + at) % len(SIZES)], number) for at in range(number % 3)]
    texts = [PROMPTS[number + at][: 60 * (number % 4)] for at in range(len(images))]
    prompt = "".join(text + IMAGE for text in texts) + PROMPTS[number][:80]
    return Request(prompt, params | seed, images=images)


REQUESTS = [_request(number) for number in range(27)]
RUN = Run(REQUESTS)
GREEDY = [request for request in REQUESTS if request.params["temperature"] == 0]
BROKEN = {
    each.__name__: Run(GREEDY, sabotage=each.__name__) for each in sabotage_of_positions.BROKEN
}

TIGHT = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "num_gpu_blocks_override": 24}
"""Prompts are read in chunks, whose ends are in images, too, and some of them twice."""

Results = Mapping[str, Mapping[str, Result]]


def _engines(model: str) -> dict[str, tuple[dict[str, Any], dict[str, Run]]]:
    """Arguments and runs by name."""
    common = {
        "model": model,
        "trust_remote_code": True,
        "limit_mm_per_prompt": {"image": 2, "video": 0},
    }
    look_up = workload.without_draft(NODES, "ngram_gpu", budget="fixed")
    return {
        "plain": (workload.without_tree() | common, {"sound": RUN}),
        "draft": (workload.tree(NODES) | common, {"sound": RUN, **BROKEN, "again": RUN}),
        "look-up": (look_up | common | TIGHT, {"sound": RUN, "again": RUN}),
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    @cache
    def serve_all(kind: str) -> Results:
        model = str(vision_target(tmp_path_factory.mktemp("targets") / kind, kind))
        return {name: serve(*job) for name, job in _engines(model).items()}

    return serve_all


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("engine", ["draft", "look-up"])
def test_no_token_differs(kind: str, engine: str, served: Callable[[str], Results]) -> None:
    results = served(kind)
    plain = by_request(RUN, results["plain"]["sound"])
    for name in ("sound", "again"):
        found = mismatches(RUN, results[engine][name], plain)
        assert not found, explain(found)
    metrics = results[engine]["sound"].metrics
    assert accepted_per_step(results[engine]["sound"]) > 0.5
    assert (metrics["vllm:num_preemptions_total"] > 0) == (engine == "look-up")


@pytest.mark.parametrize("broken", BROKEN)
def test_tokens_differ_if_positions_are_wrong(
    broken: str, served: Callable[[str], Results]
) -> None:
    results = served("qwen2_5_vl")
    plain = by_request(RUN, results["plain"]["sound"])
    found = [request for request, *_ in mismatches(BROKEN[broken], results["draft"][broken], plain)]
    assert any(request.images for request in found)
    assert any(not request.images for request in found) == (broken != "without_delta")
