"""The CUDA engine on vLLM's FlashInfer backend, emulated on a CPU: the tokens are those without
trees, on every GPU whose kernels that backend knows, and in both layouts of its cache.

emulated/__init__.py and emulated/flashinfer.py say what is emulated, and what that cannot show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import pytest
import workload
from comparison import by_request, mismatches
from emulated.models import make_pair
from emulated_engine import Emulated
from emulated_flashinfer import serve_on_flashinfer
from engine_process import Run, serve
from test_emulated_cuda import BROKEN, COPIES, LIMITS, NODES, OWN, TREE, accepted
from test_emulated_cuda import MIXED as OF_CUDA

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GPUS = {"Blackwell": ((10, 0), "HND"), "Hopper": ((9, 0), "NHD"), "Ada": ((8, 9), "NHD")}
"""Compute capability, and the layout of the cache: Blackwell's kernels read no other."""
BLOCKS = {"Ada": {"block_size": 128}}
"""FlashInfer takes no such blocks there, so vLLM halves them for all kernels."""
KERNELS = {
    "Blackwell": {"TensorRT-LLM prefill", "decode"},
    "Hopper": {"prefill", "decode"},
    "Ada": {"prefill"},
}
"""What of FlashInfer's kernels runs outside of graphs on each."""
MIXED = OF_CUDA[:5]
PLAIN = [
    replace(request, params={**request.params, "extra_args": {"dyntree_nodes": 0}})
    for request in BROKEN[:2]
]
"""Requests without trees."""
CONTROLS = {"without_kv_move": MIXED, "wrong_ancestor_bit": BROKEN, "layout_confused": BROKEN}
"""The first comes before the others teach the trees that nothing is accepted."""
RUNS = {"mixed": Run([*MIXED, *COPIES[:2], *PLAIN]), "plain": Run(PLAIN)} | {
    name: Run(requests, sabotage=name) for name, requests in CONTROLS.items()
}

Serve = Callable[[str], Mapping[str, Emulated]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def emulated(pair: tuple[str, str]) -> Serve:
    target, draft = pair
    engine = workload.with_options(NODES, budget="fixed", **TREE)
    speculation = {**engine["speculative_config"], "model": draft}
    own = {"model": target, "speculative_config": speculation, "enforce_eager": False}
    engine = {**engine, **LIMITS, **own, **OWN["fixed"]}
    return cache(lambda gpu: serve_on_flashinfer(engine | BLOCKS.get(gpu, {}), RUNS, *GPUS[gpu]))


@pytest.fixture(scope="module")
def differing(pair: tuple[str, str], emulated: Serve) -> Callable[[str, str], int]:
    every = Run([*RUNS["mixed"].requests, *BROKEN])
    engine = {**workload.without_tree(model=pair[0]), **LIMITS}
    plain = by_request(every, serve(engine, {"": every}, 1)[""])
    return lambda gpu, name: len(mismatches(RUNS[name], emulated(gpu)[name].result, plain))


@pytest.mark.parametrize("gpu", GPUS)
def test_the_tokens_are_those_without_trees(
    gpu: str, differing: Callable[[str, str], int], emulated: Serve
) -> None:
    assert differing(gpu, "mixed") == differing(gpu, "plain") == 0
    found = emulated(gpu)["mixed"]
    assert accepted(found.result) > sum(request.params["max_tokens"] for request in MIXED) / 3
    assert KERNELS[gpu] == found.replays.keys() - {"target", "placing", "verification", "drafting"}
    without_graphs = emulated(gpu)["layout_confused"].replays
    assert ("XQA of trees" in without_graphs) == (gpu == "Hopper")


@pytest.mark.parametrize("broken", CONTROLS)
@pytest.mark.parametrize("gpu", GPUS)
def test_what_is_broken_changes_tokens(
    gpu: str, broken: str, differing: Callable[[str, str], int]
) -> None:
    assert differing(gpu, broken) > 0
