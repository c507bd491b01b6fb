"""With `exactness` bits, no bit of an answer depends on trees and batches on CUDA, emulated.

emulated/__init__.py says what is emulated; products are those of a CPU in this mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import sabotage_of_bits_on_cuda
import workload
from emulated.models import make_pair
from emulated_engine import Emulated, serve_emulated
from engine_process import Run
from equal_bits import differing, without_nodes
from latent_targets import latent_target
from slow import marked
from test_emulated_cuda import LIMITS, NODES, OWN, TREE, _short
from test_emulated_layers import requests_with
from workload import ask, long

pytestmark = pytest.mark.e2e

BROKEN = [each.__name__ for each in sabotage_of_bits_on_cuda.BROKEN]
SCORES = {"logprobs": 20, "ignore_eos": True}
REQUESTS = [
    *_short(
        *(ask(n, "full", max_tokens=9, **SCORES) for n in range(3)),
        *(ask(n, "greedy", max_tokens=8, prompt_logprobs=0, **SCORES) for n in (3, 4)),
        ask(5, "full", max_tokens=8, temperature=0.7, repetition_penalty=1.3, **SCORES),
    ),
    # Their prompt is longer than what a step may compute; later ones find it in the cache.
    *(long(20, "full", 100, max_tokens=5, seed=seed, **SCORES) for seed in range(3)),
]
FEW = REQUESTS[:3]


PLAIN = Run(without_nodes(REQUESTS), batch=3)
RUNS = {
    "trees": Run(REQUESTS),
    "plain": PLAIN,
    "plain alone": Run(without_nodes(FEW), batch=1),
    "trees in batches of 2": Run(FEW, batch=2),
    **{name: Run(FEW, sabotage=name) for name in BROKEN},
    "after the sabotage": Run(FEW),
}
LATENT = requests_with(max_tokens=12, allowed_token_ids=None, **SCORES)
OF_LATENT = {
    "plain": Run(without_nodes(LATENT), batch=2),
    "trees": Run(LATENT),
    **{name: Run(LATENT, sabotage=name) for name in BROKEN[:2]},
}
"""Of DeepSeek-V2, with latent attention and experts, which drafts for itself."""
ENGINES = {
    "fixed": RUNS,
    "adaptive": {"plain": PLAIN, "trees": Run(REQUESTS)},
    "latent": OF_LATENT,
}
COMPARED = [
    (engine, name)
    for engine, runs in ENGINES.items()
    for name, run in runs.items()
    if run.sabotage is None and (engine, name) not in (("fixed", "plain"), ("latent", "plain"))
]
CONTROLS = [
    *(("fixed", name) for name in BROKEN),
    *(("latent", name) for name in BROKEN[:2]),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Mapping[str, Emulated]]:
    target, draft = make_pair(tmp_path_factory.mktemp("pair"))

    @cache
    def results(name: str) -> Mapping[str, Emulated]:
        if name == "latent":
            model = str(latent_target(tmp_path_factory.mktemp("latent"), "deepseek_v2"))
            made = workload.tree(
                6, exactness="bits", max_depth=2, width=3, children=3, lookup="off"
            )
            speculation = {**made["speculative_config"], "model": model}
            own = {"model": model, "block_size": 16, "speculative_config": speculation}
            sizes = {"mode": 0, "cudagraph_capture_sizes": [7, 14, 28]}
            own |= {"enforce_eager": False, "compilation_config": sizes}
            return serve_emulated(made | LIMITS | own, OF_LATENT, VLLM_BATCH_INVARIANT="1")
        made = workload.with_options(NODES, exactness="bits", budget=name, **TREE)
        speculation = {**made["speculative_config"], "model": draft}
        own = {"model": target, "enforce_eager": False, "speculative_config": speculation}
        engine = {**made, **LIMITS, **own, **OWN[name]}
        return serve_emulated(engine, ENGINES[name], VLLM_BATCH_INVARIANT="1")

    return results


def accepted(found: Emulated) -> float:
    return found.result.metrics["vllm:spec_decode_num_accepted_tokens_total"]


@pytest.mark.parametrize(("engine", "name"), marked(COMPARED, {"adaptive", "latent"}))
def test_answers_have_the_same_bits(
    engine: str, name: str, served: Callable[[str], Mapping[str, Emulated]]
) -> None:
    of_plain = "latent" if engine == "latent" else "fixed"
    plain, found = served(of_plain)["plain"], served(engine)[name]
    plain_run = ENGINES[of_plain]["plain"]
    assert differing(ENGINES[engine][name], found.result, plain_run, plain.result) == []
    assert ("plain" in name) == (accepted(found) == 0)


@pytest.mark.parametrize(("engine", "broken"), marked(CONTROLS, {"latent"}))
def test_a_broken_mechanism_changes_bits(
    engine: str, broken: str, served: Callable[[str], Mapping[str, Emulated]]
) -> None:
    runs, results = ENGINES[engine], served(engine)
    plain, found = results["plain"].result, results[broken].result
    assert differing(runs[broken], found, runs["plain"], plain)


def test_steps_of_trees_and_of_single_rows_were_replayed_and_prompts_came_in_chunks(
    served: Callable[[str], Mapping[str, Emulated]],
) -> None:
    results = served("fixed")
    assert results["trees in batches of 2"].replays["target"] > 0
    assert any(output.cached > 50 for output in results["trees"].result.outputs if output)
    assert max(len(output.prompt) for output in results["plain"].result.outputs if output) > 96
