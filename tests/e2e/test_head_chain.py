"""A tree without branches, drafted by a head or a block draft, is vLLM's own chain of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import heads
import pytest
import sabotage_of_blocks
import workload
from blocks import trained_block
from comparison import accepted_per_step
from engine_process import Result, Run, serve

from dyntree_plugin import pair

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOKENS = 6
RUNS = {
    "alone": Run([workload.ask(n, "greedy", ignore_eos=True) for n in range(6)], batch=1),
    "together": Run([workload.ask(n, "greedy", ignore_eos=True) for n in range(6, 18)]),
}
BROKEN = {
    each.__name__: Run(RUNS["alone"].requests, batch=1, sabotage=each.__name__)
    for each in sabotage_of_blocks.OF_CHAINS
}
OPTIONS: dict[str, Any] = {
    "max_depth": TOKENS,
    "children": 1,
    "width": 1,
}
DRAFTS = {
    **{name: lambda _, name=name: pair.paths()[name] for name in ("eagle3", "dflash")},
    **{kind: partial(trained_block, kind=kind) for kind in ("DFlash2", "Muse-Glimmer")},
    "eagle": heads.first_eagle_mirror,
    "mtp": partial(heads.mtp_mirror, modules=1),  # vLLM's chain on a CPU runs one
}
TRAINED = {*DRAFTS} - {"eagle", "mtp"}


def chain(method: str, draft: Path) -> dict[str, Any]:
    speculation = {"method": method, "num_speculative_tokens": TOKENS}
    if method == "mtp":
        return workload.without_tree(model=str(draft), speculative_config=speculation)
    return workload.without_tree(speculative_config=speculation | {"model": str(draft)})


def tree(method: str, draft: Path, nodes: int, **options: Any) -> dict[str, Any]:
    options = {"budget": "fixed", "lookup": "off"} | options
    if method == "dflash":
        return workload.with_block(draft, length=TOKENS, node_budget=nodes, **options)
    return workload.with_head(draft, method, nodes, **options)


def counts(result: Result) -> list[float]:
    """Return the number of drafts, and of those whose token at each position is accepted."""
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=%d}"
    names = ["vllm:spec_decode_num_drafts_total", *(name % at for at in range(TOKENS))]
    return [result.metrics[each] for each in names]


def tokens(result: Result) -> list[Any]:
    return [each and each.tokens for each in result.outputs]


@pytest.mark.parametrize("name", DRAFTS)
def test_it_accepts_what_vllms_chain_accepts(name: str, tmp_path: Path) -> None:
    """At temperature 0. A request's last step may count in the chain alone: trees have none for the
    last token, and count what was delivered. Controls: with branches they accept more, and others
    if a block draft reads something else."""
    method = name if name in ("eagle", "eagle3", "mtp") else "dflash"
    draft = DRAFTS[name](tmp_path / "draft")
    walk = {"worker_extension_cls": "selector_walk.Extension"} if name == "DFlash2" else {}
    broken = BROKEN if method == "dflash" else {}
    stock = serve(chain(method, draft) | walk, RUNS, threads=1)
    ours = serve(tree(method, draft, TOKENS, **OPTIONS), RUNS | broken, threads=1)
    for run in RUNS:
        pairs = zip(counts(stock[run]), counts(ours[run]), strict=True)
        assert all(0 <= of_chain - own <= len(RUNS[run].requests) for of_chain, own in pairs)
        assert tokens(ours[run]) == tokens(stock[run])
        assert counts(stock[run])[1] > 0
    for each in broken:
        assert tokens(ours[each]) == tokens(stock["alone"])
        assert counts(ours[each]) != counts(ours["alone"]), each
    if name not in TRAINED:
        return
    more = serve(tree(method, draft, 16), {"alone": RUNS["alone"]}, threads=1)["alone"]
    assert accepted_per_step(more) > accepted_per_step(stock["alone"]) > 0.5
