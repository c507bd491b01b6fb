"""A KV connector saves what trees have accepted, and an engine without trees goes on from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import workload
from engine_process import Output, Request, Run, serve
from features import PROMPTS

pytestmark = pytest.mark.e2e

BLOCK = 32
REQUESTS = [
    Request(PROMPTS[number], {"max_tokens": 150, "ignore_eos": True, **sampling}, keep=40)
    for number, sampling in enumerate([{"temperature": 0}, {"temperature": 1, "seed": 1}] * 4)
]
NEXT = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 5}


def connected(engine: dict[str, Any], folder: Path, store: str = "BlockStore") -> dict[str, Any]:
    """Return the engine's arguments with a connector, and without vLLM's own prefix cache."""
    connector = {
        "kv_connector": store,
        "kv_connector_module_path": "kv_store",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(folder)},
    }
    return engine | {"kv_transfer_config": connector, "enable_prefix_caching": False}


def outputs(engine: dict[str, Any], requests: list[Request], sabotage: str | None = None) -> Any:
    found = serve(engine, {"run": Run(requests, sabotage=sabotage)}, threads=1)["run"]
    return found.outputs, found.metrics


def continued(given: list[Output]) -> list[Request]:
    """Ask for more of each answer."""
    return [Request(each.prompt + each.tokens[0][:140], NEXT) for each in given]


@pytest.fixture(scope="module")
def plain() -> Callable[[list[Request]], list[Output]]:
    return lambda requests: outputs(workload.without_tree(), requests)[0]


def differing(found: list[Output], wanted: list[Output]) -> int:
    """Count the answers whose first logprobs differ by more than rounding."""
    pairs = [
        zip(a.logprobs[0][0], b.logprobs[0][0], strict=True)
        for a, b in zip(found, wanted, strict=True)
    ]
    return sum(any(abs(x - y) > 1e-3 for x, y in pair) for pair in pairs)


def test_an_engine_without_trees_goes_on_from_blocks_that_trees_have_filled(
    tmp_path: Path, plain: Callable[[list[Request]], list[Output]]
) -> None:
    given, metrics = outputs(connected(workload.tree(), tmp_path), REQUESTS)
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 100
    assert [each.tokens for each in given] == [each.tokens for each in plain(REQUESTS)]
    asked = continued(given)
    found, _ = outputs(connected(workload.without_tree(), tmp_path), asked)
    # The prompt's own block and those of accepted tokens, but not the last.
    assert all(each.cached >= 5 * BLOCK - BLOCK for each in found)
    wanted = plain(asked)
    assert differing(found, wanted) == 0
    assert [each.tokens for each in found] == [each.tokens for each in wanted]


@pytest.mark.parametrize(
    ("store", "sabotage"), [("EarlyStore", None), ("BlockStore", "without_kv_move")]
)
def test_blocks_saved_without_the_accepted_path_are_wrong(
    store: str, sabotage: str | None, tmp_path: Path, plain: Callable[..., list[Output]]
) -> None:
    given, _ = outputs(connected(workload.tree(), tmp_path, store), REQUESTS, sabotage)
    asked = continued(given)
    found, _ = outputs(connected(workload.without_tree(), tmp_path), asked)
    assert all(each.cached for each in found)
    assert differing(found, plain(asked)) > 0


def test_trees_go_on_from_prompts_that_an_engine_without_trees_has_read(
    tmp_path: Path, plain: Callable[[list[Request]], list[Output]]
) -> None:
    texts = ["\n".join(PROMPTS[number : number + 3]) for number in range(len(REQUESTS))]
    long = [
        Request(text, each.params, keep=100) for text, each in zip(texts, REQUESTS, strict=True)
    ]
    read = [Request(text, {"temperature": 0, "max_tokens": 1}, keep=100) for text in texts]
    outputs(connected(workload.without_tree(), tmp_path), read)
    found, metrics = outputs(connected(workload.without_draft(), tmp_path), long)
    assert all(each.cached == 3 * BLOCK for each in found)
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 50
    assert [each.tokens for each in found] == [each.tokens for each in plain(long)]
