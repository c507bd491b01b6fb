"""Forecast decode steps on a GPU from data sheets, beside what was measured on one:
python -m benchmarks.gpu_model

A forward takes the longer of two times, that of its bytes and that of its operations (the roofline
of Williams et al., 2009), and the least time of its layers. A step is the target's forward, the
draft's forwards and the launches between them. How many tokens it emits was measured on a CPU with
the embedded pair.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median

import typer

from dyntree_plugin.commands.bench.results import Series, read
from dyntree_plugin.commands.loads.runs import Run
from dyntree_plugin.options.shape import ADAPTIVE_FORWARDS, default_shape

RESULTS = Path(__file__).parent / "results"
ACCEPTANCE = RESULTS / "depths-cpu.json"
"""Tokens per step of trees of every depth and of chains: `benchmarks.acceptance` with one
--max-depth after another."""
MEASURED = RESULTS / "serve-gpu-1b-h200.json"

BYTES = 2  # of a weight, an activation and a number of the KV cache, in bfloat16
ACTIVATIONS = 20  # times that a layer reads or writes a row's hidden state, or as much; assumed
LOGIT_PASSES = 4  # times that the sampler reads or writes a row's logits in float32; assumed

BATCHES = (1, 4, 16, 64)
BUDGETS = (8, 16, 32, 64)
TEMPERATURES = (0.0, 1.0)
TREE, CHAIN, BLOCK = "calibrated", "chain", "block"
"""A dynamic tree; a chain verified token by token; a drawn chain verified as a block."""


@dataclass(frozen=True)
class Shape:
    """A decoder: its parameters, layers, and sizes in numbers. ``kv``: key and value of one token
    in one layer."""

    parameters: float
    layers: int
    hidden: int
    kv: int
    vocabulary: int


@dataclass(frozen=True)
class Gpu:
    """A data sheet: bytes and dense bfloat16 operations per second."""

    bandwidth: float
    operations: float


LLAMA_1B = Shape(1.24e9, 16, 2048, 2 * 8 * 64, 128256)
LLAMA_8B = Shape(8.03e9, 32, 4096, 2 * 8 * 128, 128256)
LLAMA_70B = Shape(70.6e9, 80, 8192, 2 * 8 * 128, 128256)
EAGLE_3_8B = Shape(0.425e9, 1, 4096, 2 * 8 * 128, 32000)
"""A head of one layer that reads two hidden states, and a matrix that joins three."""
MEASURED_TARGET = Shape(0.977e9, 16, 2048, 2 * 8 * 64, 1024)
"""Llama-3.2-1B without its vocabulary."""
EMBEDDED_DRAFT = Shape(0.5e6, 2, 128, 2 * 2 * 32, 1024)

H200 = Gpu(4.8e12, 989e12)
RTX_4090 = Gpu(1.008e12, 165e12)
PCIE_4 = 25e9
"""Bytes per second of 16 lanes: four fifths of what is nominal."""


@dataclass(frozen=True)
class Assumed:
    """What no data sheet tells.

    ``bandwidth``, ``operations``: shares of the data sheet's that are reached. Seconds: ``layer``,
    the least of a layer in a CUDA graph; ``host``, of a step outside of forwards, for every engine;
    ``captured``, of a small kernel within a graph; ``outside``, of
    an operation outside of graphs, and of a graph's replay; ``tree``, what dyntree's step takes
    beyond that. ``share``: of the measured draft tokens that are accepted.
    """

    bandwidth: float = 0.8
    operations: float = 0.6
    layer: float = 15e-6
    host: float = 0.5e-3
    captured: float = 4e-6
    outside: float = 8e-6
    tree: float = 0.0
    share: float = 1.0


ASSUMED = Assumed()
VARIED = {
    "as assumed": ASSUMED,
    "half of the tokens accepted": replace(ASSUMED, share=0.5),
    "1 ms more in a step with a tree": replace(ASSUMED, tree=1e-3),
}


def forward_seconds(
    shape: Shape,
    gpu: Gpu,
    requests: float,
    rows: float,
    context: float,
    assumed: Assumed = ASSUMED,
) -> float:
    """Return the seconds of one forward.

    Args:
        rows: tokens of each request that it computes.
        context: tokens of each request in the KV cache. A request's rows share one reading of them.
    """
    every = requests * rows
    computed = every * (2 * shape.parameters + 4 * shape.layers * shape.hidden * context)
    kept = shape.parameters + requests * context * shape.layers * shape.kv
    logits = 4 * LOGIT_PASSES * every * shape.vocabulary
    activations = BYTES * ACTIVATIONS * every * shape.layers * shape.hidden
    moved = BYTES * kept + logits + activations
    seconds = max(
        computed / (assumed.operations * gpu.operations),
        moved / (assumed.bandwidth * gpu.bandwidth),
    )
    return seconds + shape.layers * assumed.layer


@dataclass(frozen=True)
class Drafted:
    """Mean figures of one request's step: nodes verified, tokens emitted, and draft forwards, of
    which the first is the catch-up."""

    nodes: float
    tokens: float
    forwards: int

    def scaled(self, share: float) -> Drafted:
        """Return the same step if only this share of the draft's tokens were accepted."""
        return replace(self, tokens=1 + share * (self.tokens - 1))


PLAIN = Drafted(0, 1, 0)
CATCH_UP_ALONE = Drafted(0, 1, 1)
"""A step of dyntree without a tree: the draft reads the emitted token."""


@cache
def drafted(method: str, temperature: float) -> tuple[Drafted, ...]:
    """Return what was measured of a method: of trees of every size and depth, or of chains."""
    cells = json.loads(ACCEPTANCE.read_text())["cells"]
    return tuple(
        Drafted(nodes, tokens, depth)
        for name, at, depth, nodes, tokens in cells
        if (name, at) == (method, temperature)
    )


@dataclass(frozen=True)
class Pairing:
    """A target and a draft on an H200. A ``head`` is a draft that reads the target's states."""

    name: str
    target: Shape
    draft: Shape
    head: bool = False


PAIRINGS = (
    Pairing("8B, 1B draft", LLAMA_8B, LLAMA_1B),
    Pairing("8B, EAGLE-3 head", LLAMA_8B, EAGLE_3_8B, head=True),
)
MEASURED_PAIRING = Pairing("1B, embedded draft", MEASURED_TARGET, EMBEDDED_DRAFT)


@dataclass(frozen=True)
class Point:
    """A step of so many requests. ``device``: its seconds without those of the host."""

    step: Drafted
    seconds: float
    device: float
    requests: float

    @property
    def speed(self) -> float:
        """Tokens per second of all requests together."""
        return self.requests * self.step.tokens / self.seconds


def point(
    pairing: Pairing,
    step: Drafted,
    requests: float,
    *,
    width: int = 1,
    tree: bool = True,
    context: int = 1000,
    assumed: Assumed = ASSUMED,
) -> Point:
    """Return the time of a step.

    Args:
        width: nodes of each request in a draft forward after the catch-up.
        tree: whether it is dyntree's, whose launches were counted on a stand-in for CUDA; else
            vLLM's, as if all drafting of a chain were one graph.
    """

    def forward(shape: Shape, rows: float) -> float:
        return forward_seconds(shape, H200, requests, rows, context, assumed)

    device = forward(pairing.target, 1 + step.nodes)
    later = max(step.forwards - 1, 0)
    if step.forwards:
        # The catch-up has a graph for the longest path, whatever was accepted.
        device += forward(pairing.draft, 1 + min(step.nodes, step.forwards))
        device += later * forward(pairing.draft, width)
    host = assumed.host
    if tree and step.forwards:
        growing = 13 + 3 * later + (7 + 2 * later if pairing.head else 0) if step.nodes else 3
        device += assumed.captured * growing
        host += assumed.outside * (32 + later) + assumed.tree
    elif step.forwards:
        device += assumed.captured * 3 * (step.forwards + 1)
        host += assumed.outside * 12
    return Point(step, device + host, device, requests)


def best_tree(pairing: Pairing, requests: int, temperature: float, assumed: Assumed) -> Point:
    """Return the tree of most tokens per second, or none, as the adaptive budget chooses it."""
    return max(
        (
            point(pairing, step.scaled(assumed.share), requests, width=width, assumed=assumed)
            for budget in BUDGETS
            for width in (default_shape(budget)[1],)
            for step in (CATCH_UP_ALONE, *drafted(TREE, temperature))
            if step.nodes <= budget and step.forwards <= ADAPTIVE_FORWARDS
        ),
        key=lambda each: each.speed,
    )


def best_chain(pairing: Pairing, requests: int, temperature: float, assumed: Assumed) -> Point:
    """Return vLLM's chain of most tokens per second, of all lengths and ways to verify it."""
    steps = drafted(CHAIN, temperature) + drafted(BLOCK, temperature)
    return max(
        (
            point(pairing, step.scaled(assumed.share), requests, tree=False, assumed=assumed)
            for step in steps
        ),
        key=lambda each: each.speed,
    )


def gains() -> Iterator[list[str]]:
    """Yield the speed of the best tree over no speculation, and over the best chain."""
    yield ["target, draft", "temperature", "assumed", *map(str, BATCHES)]
    for pairing, at in product(PAIRINGS, TEMPERATURES):
        for name, assumed in VARIED.items():
            cells = []
            for requests in BATCHES:
                tree = best_tree(pairing, requests, at, assumed).speed
                plain = point(pairing, PLAIN, requests, assumed=assumed).speed
                chain = best_chain(pairing, requests, at, assumed).speed
                cells.append(f"{_ratio(tree / plain)}, {_ratio(tree / chain)}")
            yield [pairing.name, f"{at:g}", name, *cells]


def shapes() -> Iterator[list[str]]:
    """Yield nodes and draft forwards of the best tree, and the length of the best chain."""
    yield ["target, draft", "temperature", *map(str, BATCHES)]
    for pairing, at in product(PAIRINGS, TEMPERATURES):
        cells = []
        for requests in BATCHES:
            tree = best_tree(pairing, requests, at, ASSUMED).step
            chain = best_chain(pairing, requests, at, ASSUMED).step
            cells.append(f"{tree.nodes:.0f}/{tree.forwards}, {chain.nodes:.0f}")
        yield [pairing.name, f"{at:g}", *cells]


def beside_measured() -> Iterator[list[str]]:
    """Yield steps with trees that were measured on an H200, and the forecasts of the same steps.

    The steps of vLLM's chains are not modelled: vLLM 0.32 drafts them without CUDA graphs.
    """
    columns = ("**device ms**", "forecast", "**step ms**", "forecast", "**× none**", "forecast")
    yield ["temperature", "batch", "nodes", *columns]
    result = read(MEASURED)
    for cell in dict.fromkeys(series.cell for series in result.series):
        plain, *_, small, large = result.of(cell).values()
        for series in (small, large):
            known, without = _forecast(series.runs), _forecast(plain.runs)
            gain = _median(plain, "tpot_ms") / _median(series, "tpot_ms")
            device = median(sum(run.stages_ms.values()) for run in series.runs)
            of_each = known.speed / known.requests * without.requests / without.speed
            measured, forecast = (
                (device, _median(series, "step_ms"), gain),
                (1e3 * known.device, 1e3 * known.seconds, of_each),
            )
            pairs = zip(measured, forecast, strict=True)
            cells = [text for m, f in pairs for text in (f"**{m:.2f}**", f"{f:.2f}")]
            yield [f"{cell.temperature:g}", f"{cell.batch}", f"{known.step.nodes:.1f}", *cells]


def _median(series: Series, name: str) -> float:
    return float(median(getattr(run, name) for run in series.runs))


def _forecast(runs: list[Run]) -> Point:
    """Forecast a measured step, by its mean nodes, tokens and requests."""
    steps, of_requests = sum(run.steps for run in runs), sum(run.request_steps for run in runs)
    nodes = sum(run.speculation.draft_tokens for run in runs) / of_requests
    tokens = sum(run.output_tokens for run in runs) / of_requests
    step = Drafted(nodes, tokens, 8 if nodes else 0)  # max_depth was 8
    return point(MEASURED_PAIRING, step, of_requests / steps, width=4, context=200)


def offloaded() -> Iterator[list[str]]:
    """Yield speed-ups where the target's weights cross PCIe 4 to an RTX 4090 for every forward."""
    yield ["target, draft", "temperature", "plain step, s", "best chain", "16 nodes", "64 nodes"]
    models = (("8B, 1B draft", LLAMA_8B, LLAMA_1B), ("70B, 8B draft", LLAMA_70B, LLAMA_8B))
    for (name, target, draft), at in product(models, TEMPERATURES):
        speed = partial(_offloaded_speed, target, draft)
        chains = drafted(CHAIN, at) + drafted(BLOCK, at)
        trees = [[t for t in drafted(TREE, at) if round(t.nodes) == nodes] for nodes in (16, 64)]
        gained = [max(map(speed, each)) / speed(PLAIN) for each in (chains, *trees)]
        yield [name, f"{at:g}", f"{1 / speed(PLAIN):.2f}", *(f"{each:.1f}" for each in gained)]


def _offloaded_speed(target: Shape, draft: Shape, step: Drafted) -> float:
    """Return one request's tokens per second. The next layer crosses while one computes."""
    transfer = BYTES * target.parameters / PCIE_4
    computing = forward_seconds(target, RTX_4090, 1, 1 + step.nodes, 256)
    drafting = step.forwards * forward_seconds(draft, RTX_4090, 1, 8, 256)
    return step.tokens / (max(transfer, computing) + drafting)


def _ratio(value: float) -> str:
    """Return a factor, and in bold one that loses."""
    return f"**{value:.2f}**" if round(value, 2) < 1 else f"{value:.2f}"


def markdown(rows: Iterator[list[str]]) -> str:
    """Return a table whose first row is its head."""
    head, *lines = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *lines])


TABLES: dict[str, Callable[[], str]] = {
    "gpu_measured": lambda: markdown(beside_measured()),
    "gpu_gains": lambda: markdown(gains()),
    "gpu_shapes": lambda: markdown(shapes()),
    "gpu_offloaded": lambda: markdown(offloaded()),
}
"""The tables of benchmarks/results/README.md, by their names there."""


def main() -> None:
    """Forecast what trees give on a GPU, over no speculation and over chains."""
    for name, table in TABLES.items():
        print(f"{name}\n\n{table()}\n")  # noqa: T201


if __name__ == "__main__":
    typer.run(main)
