"""A KV connector saves what trees have accepted, and another engine goes on from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import workload
from engine_process import Output, Request, Result, Run, serve
from features import PROMPTS
from random_engines import FEW
from random_targets import random_target

from dyntree_plugin import pair

pytestmark = pytest.mark.e2e

BLOCK, BEST = 32, 5
REQUESTS = [
    Request(
        PROMPTS[n], {"max_tokens": 110, "ignore_eos": True, "logprobs": BEST, **sampling}, keep=40
    )
    for n, sampling in enumerate([{"temperature": 0}, {"temperature": 1, "seed": 1}] * 4)
]
LONG = [
    replace(each, prompt="\n".join(PROMPTS[number : number + 3]), keep=100)
    for number, each in enumerate(REQUESTS)
]
READ = [replace(each, params={"temperature": 0, "max_tokens": 1}) for each in LONG]


@dataclass(frozen=True)
class Kind:
    """Arguments of engines: that hands blocks on, that takes them, and that has no connector;
    parameters of all requests; and by how much logprobs may differ by rounding."""

    trees: dict[str, Any]
    takes: dict[str, Any]
    plain: dict[str, Any]
    params: Mapping[str, Any] = field(default_factory=dict)
    rounding: float = 1e-3

    def of(self, requests: list[Request]) -> list[Request]:
        return [replace(each, params={**each.params, **self.params}) for each in requests]

    def without_nodes(self, requests: list[Request]) -> list[Request]:
        nobody = {**self.params, "extra_args": {"dyntree_nodes": 0}}
        return [replace(each, params={**each.params, **nobody}) for each in requests]


@dataclass(frozen=True)
class Handed:
    """What an engine with trees answered while it saved blocks in a folder, and what one without
    trees did that loads them: its answers to the "next" turn, and to `READ`."""

    folder: Path
    given: Result
    loaded: Mapping[str, Result]


WITH_AVX512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM quantises caches with AVX-512 alone"
)
KINDS = (
    "draft model",
    pytest.param("block draft", marks=pytest.mark.slow),
    pytest.param("FP8 cache", marks=[pytest.mark.slow, WITH_AVX512]),
    "recurrent layers",
)


def connected(engine: dict[str, Any], folder: Path, store: str = "BlockStore") -> dict[str, Any]:
    """Return the engine's arguments with a connector."""
    connector = {
        "kv_connector": store,
        "kv_connector_module_path": "kv_store",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(folder)},
    }
    return engine | {"kv_transfer_config": connector}


Kinds = Mapping[str, Kind]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    """Engines of recurrent targets alone have vLLM's own prefix cache, without which these keep no
    states at the ends of blocks. On a CPU vLLM has none for Mamba-2, so the engine that takes
    states has trees, and requests that want no nodes."""
    without = {"enable_prefix_caching": False}
    recurrent = {"model": str(random_target(tmp_path_factory.mktemp("recurrent"), "nemotron_h"))}
    cached = {"enable_prefix_caching": True, "prefix_cache_retention_interval": None}
    plain = workload.without_tree() | without
    block = workload.with_block(pair.paths()["dflash"], budget="fixed")
    fp8 = {"kv_cache_dtype": "fp8"}
    look_up = workload.without_draft(8, "ngram_gpu", budget="fixed") | recurrent | cached
    return {
        "draft model": Kind(workload.tree() | without, plain, plain),
        "block draft": Kind(block | without, plain, plain),
        "FP8 cache": Kind(workload.tree() | without | fp8, plain | fp8, plain | fp8, rounding=0.01),
        "recurrent layers": Kind(look_up, look_up, plain | recurrent, FEW),
    }


@pytest.fixture(scope="module")
def handed(tmp_path_factory: pytest.TempPathFactory, kinds: Kinds) -> Callable[..., Handed]:
    @cache
    def with_store(kind: str, store: str = "BlockStore") -> Handed:
        own, folder = kinds[kind], tmp_path_factory.mktemp(store)
        trees = connected(own.trees, folder, store)
        requests = own.of(REQUESTS)
        given = serve(trees, {"run": Run(requests)}, threads=1)["run"]
        pairs = zip(requests, given.outputs, strict=True)
        asked = [Request(o.prompt + o.tokens[0], r.params) for r, o in pairs if o is not None]
        runs = {"next": Run(own.without_nodes(asked)), "read": Run(own.without_nodes(READ))}
        return Handed(folder, given, serve(connected(own.takes, folder), runs, 1))

    return with_store


@pytest.fixture(scope="module")
def plain(kinds: Kinds) -> Callable[[str], Mapping[str, Result]]:
    """Return what gives both turns, and the answers to long prompts, without connector and
    trees."""
    turns = [replace(each, turns=2) for each in REQUESTS]

    @cache
    def of_kind(kind: str) -> Mapping[str, Result]:
        own = kinds[kind]
        runs = {"next": Run(own.of(turns)), "long": Run(own.of(LONG))}
        return serve(own.plain, runs, threads=1)

    return of_kind


def answers(result: Result) -> list[tuple[list[int], list[list[int]]]]:
    return [(each.prompt, each.tokens) for each in result.outputs if each is not None]


def apart(found: Result, wanted: Result) -> list[float]:
    """Return by how much the first logprobs of each answer differ."""

    def first(output: Output | None) -> list[float]:
        assert output is not None
        # There is one more where the answer's token is not among the best.
        return output.logprobs[0][0][: 1 + BEST]

    pairs = zip(map(first, found.outputs), map(first, wanted.outputs), strict=True)
    return [max(abs(x - y) for x, y in zip(*pair, strict=True)) for pair in pairs]


Plain = Callable[[str], Mapping[str, Result]]


@pytest.mark.parametrize("kind", KINDS)
def test_another_engine_goes_on_from_blocks_that_trees_have_filled(
    kind: str,
    handed: Callable[..., Handed],
    kinds: Kinds,
    plain: Plain,
    tell: Callable[[str], None],
) -> None:
    own = handed(kind)
    found, wanted = own.loaded["next"], plain(kind)["next"]
    accepted = own.given.metrics["vllm:spec_decode_num_accepted_tokens_total"]
    cached = [each.cached for each in found.outputs if each is not None]
    tell(f"{kind}: {accepted} accepted, {cached} loaded, logprobs {apart(found, wanted)} apart")
    assert accepted > 100
    # The prompt's own block and those of accepted tokens, but not the last.
    assert min(cached) >= 4 * BLOCK - BLOCK
    assert max(apart(found, wanted)) <= kinds[kind].rounding
    assert answers(found) == answers(wanted)


@pytest.mark.parametrize(
    "kind", [*KINDS[:-1], pytest.param("recurrent layers", marks=pytest.mark.slow)]
)
def test_blocks_saved_before_verification_are_wrong(
    kind: str, handed: Callable[..., Handed], kinds: Kinds, plain: Plain
) -> None:
    found = handed(kind, "EarlyStore").loaded["next"]
    assert all(each is not None and each.cached for each in found.outputs)
    assert max(apart(found, plain(kind)["next"])) > kinds[kind].rounding


def test_states_that_are_loaded_within_a_step_are_wrong(
    handed: Callable[..., Handed], kinds: Kinds, plain: Plain
) -> None:
    """vLLM's runner has copied them by then."""
    kind, own = "recurrent layers", handed("recurrent layers")
    asked = [
        replace(request, prompt=each.prompt, keep=None)
        for request, each in zip(REQUESTS, own.loaded["next"].outputs, strict=True)
        if each is not None
    ]
    runs = {"next": Run(kinds[kind].without_nodes(asked))}
    found = serve(connected(kinds[kind].takes, own.folder, "WithinAStep"), runs, threads=1)["next"]
    assert all(each is not None and each.cached for each in found.outputs)
    assert max(apart(found, plain(kind)["next"])) > kinds[kind].rounding


def test_trees_go_on_from_prompts_that_an_engine_without_trees_has_read(
    handed: Callable[..., Handed], plain: Plain
) -> None:
    trees = connected(
        workload.without_draft() | {"enable_prefix_caching": False}, handed("draft model").folder
    )
    found = serve(trees, {"long": Run(LONG)}, threads=1)["long"]
    assert all(each is not None and each.cached == 3 * BLOCK for each in found.outputs)
    assert found.metrics["vllm:spec_decode_num_accepted_tokens_total"] > 50
    assert answers(found) == answers(plain("draft model")["long"])
