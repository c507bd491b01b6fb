"""Engines whose target's weights are offloaded: drafts stay on the device, tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import heads
import pytest
import workload
from engine_process import Run
from offloaded_engine import serve_offloaded

from dyntree_plugin import pair

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GB_PER_S = 0.2
RUN = Run([workload.ask(number, "greedy", ignore_eos=True) for number in range(4)], batch=2)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return a function that gives what an engine did."""
    head = heads.random_head(tmp_path_factory.mktemp("offloaded") / "head")
    pool = workload.tree(16, drafts=[str(pair.paths()["draft"])])
    engines = {"pool": pool, "head": workload.with_head(head), "as vLLM loads it": pool}
    return cache(
        lambda name: serve_offloaded(
            engines[name], RUN, GB_PER_S, drafts_too=name == "as vLLM loads it"
        )
    )


@pytest.mark.parametrize("drafts", ["pool", "head"])
def test_the_layers_of_no_draft_come_over_the_link(drafts: str, found: Any) -> None:
    """The control loads drafts as vLLM does."""
    assert len(found(drafts)["linked"]) == 1
    assert len(found("as vLLM loads it")["linked"]) == 3


def test_drafts_that_are_offloaded_draft_slowly(found: Any, record_property: Any) -> None:
    """That is the control's: a forward waits for all layers of both drafts but the first."""
    target, *drafts = found("as vLLM loads it")["linked"]
    slow, fast = (found(name)["stages"] for name in ("as vLLM loads it", "pool"))
    transfer = sum(drafts) / (GB_PER_S * 1e9)
    record_property(
        "figure",
        f"drafts of {sum(drafts) / 1e6:.1f} MB at {GB_PER_S} GB/s: a step drafts for "
        f"{1e3 * slow['draft']:.0f} ms if they are offloaded, for {1e3 * fast['draft']:.0f} ms if "
        "they are not",
    )
    assert slow["draft"] > 2 * transfer
    assert target > sum(drafts)


def test_tokens_do_not_depend_on_what_is_offloaded_or_drafts(found: Any) -> None:
    wanted = found("as vLLM loads it")["tokens"]
    assert all(len(tokens[0]) > 1 for tokens in wanted)
    assert found("pool")["tokens"] == wanted
    assert found("head")["tokens"] == wanted
