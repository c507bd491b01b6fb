"""What the pages say of block chains is what their result files say."""

from __future__ import annotations

from pathlib import Path

from dyntree_plugin.commands.bench import summary
from dyntree_plugin.commands.bench.results import read

ROOT = Path(__file__).parents[2]


def test_the_pages_say_how_fast_block_chains_are() -> None:
    over: dict[str, dict[int, list[float]]] = {"chains": {}, "trees": {}}
    names = {"chains": "dynamic tree of 16, block_chains on", "trees": "dynamic tree of 16"}
    for suffix in ("", "-64"):
        found = read(ROOT / "benchmarks" / "results" / f"serve-llama-1b-block-chains{suffix}.json")
        for cell in found.cells():
            rows = {row.series.engine: row for row in summary.rows(found, cell)}
            for kind, name in names.items():
                ratio = rows[name].over_chain
                assert ratio is not None
                over[kind].setdefault(cell.batch, []).append(ratio.median)
    page, compared = (
        " ".join((ROOT / "docs" / name).read_text().split())
        for name in ("results.md", "comparison.md")
    )
    told = {
        (kind, batch): " to ".join(dict.fromkeys(f"{r:.2f}" for r in (min(found), max(found))))
        for kind, by_batch in over.items()
        for batch, found in by_batch.items()
    }
    assert (
        f"block chains are {told['chains', 1]} times as fast as the best of vLLM's chains at batch "
        f"1 and {told['chains', 4]} times at batch 4. Trees reach {told['trees', 1]}, and "
        f"{told['trees', 4]}." in page
    )
    every = [ratio for found in over["chains"].values() for ratio in found]
    assert f"{min(every):.2f} to {max(every):.2f} times as fast as the best of vLLM's" in compared


def test_the_page_says_how_many_tokens_block_chains_emit() -> None:
    found = read(ROOT / "benchmarks" / "results" / "tokens-block-chains.json")
    (cell,) = found.cells()
    tokens = {row.series.engine: row.tokens_per_step or 0.0 for row in summary.rows(found, cell)}

    def ours(nodes: int) -> float:
        start = f"dynamic tree of {nodes}, budget fixed, max_forwards"
        return next(value for name, value in tokens.items() if name.startswith(start))

    over_chains = [ours(nodes) / tokens[f"block chain of {nodes}"] for nodes in (8, 12, 16)]
    over_trees = [
        ours(nodes) / tokens[f"dynamic tree of {nodes}, budget fixed"] for nodes in (8, 16)
    ]
    trees, chains = (f"{min(r):.2f} to {max(r):.2f} times" for r in (over_trees, over_chains))
    said = " ".join((ROOT / "docs" / "results.md").read_text().split())
    assert (
        f"They emit {trees} the tokens of trees with as many nodes, and {chains} those of" in said
    )
