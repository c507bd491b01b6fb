"""Write the generated tables into the pages, between their marks: make tables

A table's marks are the lines `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import ast
import csv
import json
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.real import report
from dyntree_plugin.commands.bench import table
from dyntree_plugin.commands.bench.results import Result, read
from dyntree_plugin.commands.bench.summary import Row, rows
from dyntree_plugin.metrics import names
from dyntree_plugin.options import pages as option_pages
from dyntree_plugin.tree import pairs

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.S)


def _speed_ups(name: str, *, by_prompts: bool = False) -> str:
    """Compare engines by their times per token alone, in one table of all cells.

    A text has the speed over no speculation and over the best chain; trees that lose are bold. Of
    a kind of chains, the best length stands in each cell. ``by_prompts``: of several kinds of
    prompts, with a row for each cell in place of a column.
    """
    result = read(RESULTS / f"{name}.json")
    labels = _kinds(result)
    cells = result.cells()
    if by_prompts:
        cells = sorted(cells, key=lambda cell: (cell.prompts, cell.temperature, cell.batch))
    texts = {}
    for cell in cells:
        found = rows(result, cell)
        of_prompts = f"{cell.prompts}, " * by_prompts
        texts[f"{of_prompts}T {cell.temperature:g}, batch {cell.batch}"] = [
            _speed_up(result, _fastest(result, found, label)) for label in labels
        ]
    if by_prompts:
        return _markdown(labels, texts)
    of_labels = zip(*texts.values(), strict=True)
    return _markdown(list(texts), dict(zip(labels, of_labels, strict=True)))


def _markdown(columns: Sequence[str], lines: Mapping[str, Sequence[str]]) -> str:
    """Write a table of speeds."""
    head = f"| × no speculation, × best chain | {' | '.join(columns)} |"
    body = [f"| {label} | {' | '.join(texts)} |" for label, texts in lines.items()]
    return "\n".join([head, "|---|" + "---:|" * len(columns), *body])


def _kinds(result: Result) -> list[str]:
    return [*dict.fromkeys(_kind(result, engine.name) for engine in result.engines)]


def _on_gpus(part: str) -> str:
    """Compare engines on each GPU that has a result of a part of the GPU suite."""
    tables = []
    for name in sorted(path.stem for path in RESULTS.glob(f"serve-gpu-{part}-*.json")):
        gpu = read(RESULTS / f"{name}.json").provenance["gpu"]
        file = f"[`{name}.json`](../benchmarks/results/{name}.json)"
        tables.append(f"{gpu} ({file}):\n\n{_speed_ups(name)}")
    return "\n\n".join(tables)


def _kind(result: Result, engine: str) -> str:
    """Return what a row shows: one engine, or the chains of a kind."""
    kind, _, length = engine.rpartition(" of ")
    return kind if length and result.engine(engine).kind == "chain" else engine


def _fastest(result: Result, found: Iterable[Row], kind: str) -> Row | None:
    of_kind = (row for row in found if _kind(result, row.series.engine) == kind)
    return min(of_kind, key=lambda row: row.tpot_ms.median, default=None)


def _speed_up(result: Result, row: Row | None) -> str:
    if row is None or row.over_chain is None:
        return table.NONE
    name = row.series.engine
    if name == result.engines[0].name:
        return f"{row.tpot_ms.median:.1f} ms"
    text = f"{row.over_first.median:.2f}, {row.over_chain.median:.2f}"
    if result.engine(name).kind == "chain":
        return f"{text} ({name.rpartition(' of ')[2]})"
    lost = table.loses(row.over_first) or table.loses(row.over_chain)
    return f"**{text}**" if table.has_trees(result, row) and lost else text


def _peers() -> str:
    """Compare times per token of single requests with those of other engines' speculation."""
    found = json.loads((RESULTS / "peers-llama-1b.json").read_text())["series"]
    times = {(each["engine"], each["chain"], each["temperature"]): each for each in found}
    lines = ["| | temperature 0 | temperature 1 |", "|---|---:|---:|"]
    for engine, chain in dict.fromkeys((each["engine"], each["chain"]) for each in found):
        of_both = [times[engine, chain, t]["ms_per_token"] for t in (0.0, 1.0)]
        texts = [
            f"{statistics.fmean(each):.1f} ± {_error_of_mean(each):.1f} ms" for each in of_both
        ]
        name = f"{engine}, chain of {chain}" if chain else engine
        lines.append(f"| {name} | {' | '.join(texts)} |")
    result = read(RESULTS / "serve-llama-1b-zen5.json")
    cells = [cell for cell in result.cells() if cell.batch == 1]
    for label in _kinds(result):
        texts = []
        for cell in cells:
            best = _fastest(result, rows(result, cell), label)
            texts.append(table.NONE if best is None else f"{best.tpot_ms.median:.1f} ms")
        engine = "vLLM with dyntree" if "tree" in label else "vLLM"
        lines.append(f"| {engine}, {label} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _error_of_mean(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


STEP = (
    ("engine/stage.py", "place", "GPUModelRunner.prepare_attn"),
    ("engine/step/verify.py", "verify", "GPUModelRunner.rejection_sampler"),
    ("engine/step/draft.py", "draft", "GPUModelRunner.speculator.propose"),
    ("tree/drafting.py", "grow", "draft"),
)
"""The functions of a step that do its work, in the order in which it runs them, and what leads to
them: hooks of vLLM but for the last."""


def _step() -> str:
    """Return the bodies of the functions of a step, as they are in the code."""
    parts = [
        f"# {path}: {name}, from {hook}\n{_body(ROOT / 'dyntree_plugin' / path, name)}"
        for path, name, hook in STEP
    ]
    return "```python\n" + "\n\n".join(parts) + "\n```"


def _body(path: Path, name: str) -> str:
    """Return the body of a function, without its docstring."""
    source = path.read_text()
    found = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    function = next(found)
    first = function.body[0]
    begin = function.body[1 if isinstance(first, ast.Expr) else 0].lineno
    lines = source.splitlines()
    return textwrap.dedent("\n".join(lines[begin - 1 : function.end_lineno]))


REASONS = {
    "is_hybrid, architecture": "class of recurrent target",
    "is_mm_prefix_lm, architecture": "images that see each other both ways",
    "uses_mrope, architecture": "class with M-RoPE",
    "uses_mrope": "M-RoPE",
    "use_mla": "latent attention",
    "use_mla, dtype": "latent attention",
    "MultiHeadLatentAttention": "latent attention",
    "use_mla (target, draft)": "draft without latent attention",
    "architecture (draft)": "head that vLLM cannot load",
    "use_mla, kv_lora_rank, qk_rope_head_dim": "size of latent vectors",
    "use_mla, index_topk": "sparse attention",
    "index_topk, architecture": "sparse attention",
    "index_topk (target, draft), architecture (draft)": "sparse attention",
    "DeepseekV32IndexerCache": "sparse attention",
    "DeepseekV4Attention": "sparse attention",
    "MiniMaxM3SparseAttention": "sparse attention",
    "use_mla, kv_cache_dtype": "FP8 cache",
    "index_topk, kv_cache_dtype, compute capability": "`fp8_e4m3` cache on Hopper",
    "method, target's use_mla, uses_mrope": "block draft",
    "draft's architectures": "class of block draft",
    "num_nextn_predict_layers, architecture": "several modules",
    "value_size": "keys and values of different sizes",
    "layers without a type in layer_types": "several modules",
    "QwenGatedDeltaNetAttention": "Gated DeltaNet",
    "KimiGatedDeltaNetAttention": "KDA",
    "BailingMoeV3KimiDeltaAttention": "KDA",
}
"""Words for the names in messages of refusals."""


def _recipes() -> str:
    """Say by which method each recipe of vLLM is served, whether its default command starts on
    CUDA, and what stands in the way."""
    groups = json.loads((ROOT / "scripts" / "recipes.json").read_text())
    checkpoints = list(csv.DictReader((ROOT / "scripts" / "checkpoints.csv").open()))
    commands = {each["recipe"]: each for each in checkpoints if each["checkpoint"] == "default"}
    rows: dict[tuple[str, str, str], list[str]] = {}
    for each in groups:
        first = each["methods"][0]
        on_cpu, on_cuda = (_served(each[device], first) for device in DEVICES)
        both = on_cpu if on_cpu == on_cuda else f"on a CPU {on_cpu}; on CUDA {on_cuda}"
        for name in each["recipes"]:
            rows.setdefault((first, both, _starts(commands.get(name))), []).append(name)
    lines = ["| recipes | drafts | served | default command |", "|---|---|---|---|"]
    lines += [
        f"| {', '.join(names)} | `{first}` | {both} | {default} |"
        for (first, both, default), names in rows.items()
    ]
    counts = [_counted(groups, device) for device in DEVICES]
    every = sum(len(each["recipes"]) for each in groups)
    head = f"Of {every} recipes, {counts[0]} are served on a CPU, and {counts[1]} on CUDA."
    default, listed = (
        sum(not each["refused"] for each in of) for of in (commands.values(), checkpoints)
    )
    head += (
        f" The default commands of {default} are admitted on CUDA, and those of {listed} of the "
        f"{len(checkpoints)} checkpoints that the recipes with served drafts list."
    )
    return "\n".join([*textwrap.wrap(head, 120), "", *lines])


def _starts(checkpoint: dict[str, str] | None) -> str:
    """Say whether a checkpoint's command starts; None is one whose target or draft is refused."""
    if checkpoint is None:
        return "no"
    refused = checkpoint["refused"]
    return f"refused: {_words(refused.split('; '))}" if refused else "starts"


def _words(names: Iterable[str]) -> str:
    """Return words for the names in messages of refusals, each once."""
    return ", ".join(dict.fromkeys(REASONS.get(name, f"`{name}`") for name in names))


DEVICES = ("cpu", "cuda")


def _served(outcome: dict[str, Any], first: str) -> str:
    if outcome["served"] == first:
        return f"yes, from vLLM {outcome['vllm']}" if "vllm" in outcome else "yes"
    names = (each.removeprefix("speculative_config.") for each in outcome["refused"])
    words = _words(names)
    method = {None: "", "ngram_gpu": "look-up alone; "}.get(
        outcome["served"], f"`{outcome['served']}` alone; "
    )
    return f"{method}refused: {words}"


def _counted(groups: list[dict[str, Any]], device: str) -> str:
    """Count the recipes that are served, and those of them whose own drafts are."""
    served = [(each[device]["served"], each) for each in groups if each[device]["served"]]
    own = sum(len(each["recipes"]) for name, each in served if name in each["methods"])
    return f"{sum(len(each['recipes']) for _, each in served)} ({own} with their own drafts)"


TABLES: dict[str, Callable[[], str]] = {
    "step": _step,
    "options": option_pages.markdown_tables,
    "metrics": names.markdown_table,
    "rules": pairs.markdown_table,
    **{
        f"speed_{name}": partial(_speed_ups, file)
        for name, file in {
            "amx": "serve-llama-1b",
            "no_amx": "serve-llama-1b-zen5",
            "head": "serve-llama-1b-eagle3",
            "offload": "serve-llama-1b-offload",
        }.items()
    },
    "speed_smollm2": partial(_speed_ups, "serve-smollm2-look-up", by_prompts=True),
    "speed_gpu": partial(_on_gpus, "1b"),
    "peers": _peers,
    "recipes": _recipes,
    "real": lambda: report.table(json.loads((RESULTS / "real-cpu.json").read_text())["series"]),
}


def with_tables(page: str) -> str:
    """Return a page with its tables as they are to be."""
    return MARKED.sub(lambda m: f"{m[1]}{TABLES[m[2]]().strip()}\n{m[4]}", page)


PAGES = (*sorted((ROOT / "docs").glob("*.md")), RESULTS / "README.md")


def main() -> None:
    for path in PAGES:
        page = path.read_text()
        if (written := with_tables(page)) != page:
            path.write_text(written)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
