"""A tree without branches, drafted by a head, is vLLM's own chain of that head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import workload
from comparison import accepted_per_step
from engine_process import Result, Run, serve

from dyntree_plugin import pair

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOKENS = 6
RUNS = {
    "alone": Run([workload.ask(n, "greedy", ignore_eos=True) for n in range(6)], batch=1),
    "together": Run([workload.ask(n, "greedy", ignore_eos=True) for n in range(6, 18)]),
}
OPTIONS: dict[str, Any] = {
    "max_depth": TOKENS,
    "children": 1,
    "width": 1,
    "budget": "fixed",
    "lookup": "off",
}


def chain(head: Path) -> dict[str, Any]:
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": TOKENS}
    return workload.without_tree(speculative_config=speculation)


def accepted(result: Result) -> dict[str, float]:
    """Return vLLM's own counts: drafts, and accepted tokens by their position in the draft."""
    return {
        name: value
        for name, value in result.metrics.items()
        if name.startswith(("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted"))
    }


def test_it_accepts_what_vllms_chain_accepts() -> None:
    """At temperature 0. Control: with branches it accepts more."""
    head = pair.paths()["eagle3"]
    stock = serve(chain(head), RUNS, threads=1)
    ours = serve(workload.with_head(head, nodes=TOKENS, **OPTIONS), RUNS, threads=1)
    for name in RUNS:
        assert accepted(ours[name]) == accepted(stock[name])
        assert [o and o.tokens for o in ours[name].outputs] == [
            o and o.tokens for o in stock[name].outputs
        ]
    branching = workload.with_head(head, nodes=16, budget="fixed", lookup="off")
    more = serve(branching, {"alone": RUNS["alone"]}, threads=1)["alone"]
    assert accepted_per_step(more) > accepted_per_step(stock["alone"]) > 1
