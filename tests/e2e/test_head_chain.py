"""A tree without branches, drafted by a head or a block draft, is vLLM's own chain of it."""

from __future__ import annotations

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
}


def chain(method: str) -> dict[str, Any]:
    model = str(pair.paths()[method])
    speculation = {"method": method, "model": model, "num_speculative_tokens": TOKENS}
    return workload.without_tree(speculative_config=speculation)


def tree(method: str, nodes: int, **options: Any) -> dict[str, Any]:
    model, options = pair.paths()[method], {"budget": "fixed", "lookup": "off"} | options
    if method == "dflash":
        return workload.with_block(model, length=TOKENS, node_budget=nodes, **options)
    return workload.with_head(model, method, nodes, **options)


def counts(result: Result) -> list[float]:
    """Return the number of drafts, and of those whose token at each position is accepted."""
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=%d}"
    names = ["vllm:spec_decode_num_drafts_total", *(name % at for at in range(TOKENS))]
    return [result.metrics[each] for each in names]


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_it_accepts_what_vllms_chain_accepts(method: str) -> None:
    """At temperature 0. A request's last step may count in the chain alone: trees have none for the
    last token, and count what was delivered. Control: with branches they accept more."""
    stock = serve(chain(method), RUNS, threads=1)
    ours = serve(tree(method, TOKENS, **OPTIONS), RUNS, threads=1)
    for name in RUNS:
        pairs = zip(counts(stock[name]), counts(ours[name]), strict=True)
        assert all(0 <= of_chain - own <= len(RUNS[name].requests) for of_chain, own in pairs)
        assert [o and o.tokens for o in ours[name].outputs] == [
            o and o.tokens for o in stock[name].outputs
        ]
    more = serve(tree(method, 16), {"alone": RUNS["alone"]}, threads=1)["alone"]
    assert accepted_per_step(more) > accepted_per_step(stock["alone"]) > 0.5
