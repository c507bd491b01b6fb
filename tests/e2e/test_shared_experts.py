"""Data-parallel ranks share a target's experts, and each answers as one rank without trees."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import workload
from comparison import Outputs, by_request, mismatches
from engine_process import Request, Result, Run, serve
from features import PROMPTS
from heads import random_head, target_config
from latent_targets import latent_head, latent_target
from random_engines import ABORTED, FEW, FLOAT32_DELTA_NET, LATENT_ON_CPU, NODES, RUN
from random_targets import random_target
from references import serve_right
from shared_experts import ASKED, serve_together

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REQUESTS = RUN.requests
UNEVEN = (Run(REQUESTS[:22]), Run(REQUESTS[22:]))
RUNS: dict[str, tuple[Run, Run]] = {
    "uneven": UNEVEN,
    "one idle": (Run([]), RUN),
    "aborted": (ABORTED, Run(REQUESTS[::-1], abort_after={0: 3, 4: 1, 9: 6, 29: 2})),
}
BROKEN: dict[str, tuple[Run, Run]] = {
    name: (Run(UNEVEN[0].requests, sabotage=name), Run(UNEVEN[1].requests, sabotage=name))
    for name in ("asks_before_each_forward", "own_experts_alone", "without_kv_move")
}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"

Served = dict[str, tuple[Result, Result]]
"""What both ranks did in each run."""


def together(engine: dict[str, Any], runs: dict[str, tuple[Run, Run]]) -> Served:
    by_rank = [{name: run[rank] for name, run in runs.items()} for rank in (0, 1)]
    first, second = serve_together(engine, by_rank)
    return {name: (first[name], second[name]) for name in runs}


def differing(runs: tuple[Run, Run], found: tuple[Result, Result], plain: Outputs) -> int:
    return sum(len(mismatches(*pair, plain)) for pair in zip(runs, found, strict=True))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("experts")
    of_pair = {name: target_config()[name] for name in ("hidden_size",)}
    target: dict[str, Any] = {"model": str(random_target(folder / "t", "qwen3_moe", **of_pair))}
    head = random_head(folder / "head", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    fixed = {"budget": "fixed"}
    return {
        "plain": workload.without_tree() | target,
        "draft": workload.tree(NODES) | target,
        "adaptive": workload.with_options() | target | workload.STEADY,
        "head": workload.with_head(head, nodes=NODES, **fixed) | target,
        "look-up": workload.without_draft(NODES, **fixed) | target,
    }


@pytest.fixture(scope="module")
def plain(engines: dict[str, dict[str, Any]]) -> Outputs:
    return by_request(RUN, serve_right(engines["plain"], {"sound": RUN})["sound"])


@pytest.fixture(scope="module")
def served(engines: dict[str, dict[str, Any]]) -> Callable[[str], Served]:
    @cache
    def by(engine: str) -> Served:
        runs = {"uneven": UNEVEN} if engine == "plain" else RUNS
        return together(engines[engine], runs | (BROKEN if engine == "draft" else {}))

    return by


def test_two_ranks_without_trees_answer_as_one(
    served: Callable[[str], Served], plain: Outputs
) -> None:
    assert differing(UNEVEN, served("plain")["uneven"], plain) == 0


@pytest.mark.parametrize("engine", ["draft", "adaptive", "head", "look-up"])
def test_two_ranks_with_trees_answer_as_one_without(
    engine: str, served: Callable[[str], Served], plain: Outputs
) -> None:
    for name, runs in RUNS.items():
        found = served(engine)[name]
        assert differing(runs, found, plain) == 0
        for run, result in zip(runs, found, strict=True):
            assert result.metrics[ASKED] == 0
            assert (result.metrics[ACCEPTED] > 0) == bool(run.requests)


def test_ranks_whose_drafts_ask_each_other_would_wait_forever(
    served: Callable[[str], Served],
) -> None:
    first, second = served("draft")["asks_before_each_forward"]
    assert first.metrics[ASKED] > second.metrics[ASKED] > 0


@pytest.mark.parametrize("broken", ["own_experts_alone", "without_kv_move"])
def test_what_is_broken_is_seen_in_the_answers(
    broken: str, served: Callable[[str], Served], plain: Outputs
) -> None:
    assert differing(BROKEN[broken], served("draft")[broken], plain) > 0


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_next", "deepseek_v2"])
def test_ranks_of_other_targets_answer_as_one_without_trees(kind: str, tmp_path: Path) -> None:
    """Windows and sinks, recurrent layers, and latent attention with a head."""
    make = latent_target if kind == "deepseek_v2" else random_target
    model = make(tmp_path / kind, kind)
    own = {"qwen3_next": FLOAT32_DELTA_NET, "deepseek_v2": LATENT_ON_CPU}.get(kind, {})
    of = {"model": str(model)}
    plain = serve_right(workload.without_tree() | of | own, {"sound": RUN})["sound"]
    wanted = by_request(RUN, plain)
    trees = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | of
    if kind == "deepseek_v2":
        head = latent_head(tmp_path / "head", model)
        trees = workload.with_head(head, nodes=NODES, budget="fixed") | of
    runs = {name: RUNS[name] for name in ("uneven", "one idle")}
    found = together(trees, runs | {"broken": BROKEN["without_kv_move"]})
    for name, run in runs.items():
        assert differing(run, found[name], wanted) == 0
        assert sum(each.metrics[ACCEPTED] for each in found[name]) > 0
    assert differing(BROKEN["without_kv_move"], found["broken"], wanted) > 0


def test_an_engine_without_trees_goes_on_from_blocks_that_ranks_have_filled(
    engines: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    connector = {
        "kv_connector": "BlockStore",
        "kv_connector_module_path": "kv_store",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(tmp_path)},
    }
    stored = {"kv_transfer_config": connector, "enable_prefix_caching": False}
    params = {"max_tokens": 70, "ignore_eos": True, "temperature": 0, **FEW}
    asked = [Request(PROMPTS[number], params, keep=40) for number in range(16)]
    broken = "without_kv_move"
    runs = {
        "sound": (Run(asked[:6]), Run(asked[6:8])),
        "broken": (Run(asked[8:14], sabotage=broken), Run(asked[14:], sabotage=broken)),
    }
    given = together(engines["draft"] | stored, runs)
    following = {
        name: Run(
            [
                Request(each.prompt + each.tokens[0], params)
                for result in found
                for each in result.outputs
                if each is not None
            ]
        )
        for name, found in given.items()
    }
    loaded = serve(engines["plain"] | stored, following, threads=1)
    plain = serve(engines["plain"], following, threads=1)
    differ = {
        name: len(mismatches(run, loaded[name], by_request(run, plain[name])))
        for name, run in following.items()
    }
    assert all(each is not None and each.cached >= 3 * 32 for each in loaded["sound"].outputs)
    assert differ["sound"] == 0 < differ["broken"]
