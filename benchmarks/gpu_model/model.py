"""The seconds of a step with a tree, with a chain and with neither, and the best of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

from benchmarks import laboratory, roofline
from benchmarks.laboratory import BLOCK, CHAIN, PLAIN, TREE, Drafted
from benchmarks.roofline import H200, Gpu, Shape, forward_seconds
from dyntree_plugin.options.shape import ADAPTIVE_FORWARDS, default_shape

MEMORY_SHARE = 0.9
"""Of a GPU's memory, for weights and KV."""
BUDGETS = (8, 16, 32, 64)
CATCH_UP_ALONE = Drafted(0, 1, 1, 1)
"""A step of dyntree without a tree: the draft reads the emitted token."""
BLOCK_PASSES = 8
"""How often dyntree reads or writes a float32 number for each token of a block chain and each entry
of the vocabulary, beyond the six times that vLLM's block verification does. From reading both."""


@dataclass(frozen=True)
class Assumed:
    """What is assumed of an engine, and of the draft.

    ``host``: seconds of a step outside of forwards, for every engine. ``captured``: seconds of a
    small kernel within a graph. ``outside``: of an operation outside of graphs, and of the replay
    of a graph. ``launches`` multiplies the least time of a layer. ``share``: of the laboratory's
    draft tokens that are accepted. ``tree`` and ``chain``: further seconds of dyntree's step and of
    vLLM's with a chain.
    """

    host: float = 0.5e-3
    captured: float = 4e-6
    outside: float = 8e-6
    launches: float = 1.0
    share: float = 1.0
    tree: float = 0.0
    chain: float = 0.0


ASSUMED = Assumed()


@dataclass(frozen=True)
class Pairing:
    """A target with its draft on one or several GPUs. A ``head`` is a draft that reads the target's
    hidden states."""

    name: str
    target: Shape
    draft: Shape
    gpu: Gpu = H200
    gpus: int = 1
    head: bool = False

    def fits(self, requests: int, context: int) -> bool:
        """Return whether the KV of so many requests fits beside the weights."""
        weights = self.target.weight_bytes + self.draft.weight_bytes
        kv = requests * context * (self.target.kv_bytes + self.draft.kv_bytes)
        return weights + kv <= MEMORY_SHARE * self.gpus * self.gpu.memory


PAIRINGS = (
    Pairing("8B, 1B draft", roofline.LLAMA_8B, roofline.LLAMA_1B),
    Pairing("8B, EAGLE-3 head", roofline.LLAMA_8B, roofline.EAGLE_3_8B, head=True),
    Pairing("70B, 1B draft", roofline.LLAMA_70B, roofline.LLAMA_1B, gpus=4),
    Pairing("70B, 8B draft", roofline.LLAMA_70B, roofline.LLAMA_8B, gpus=4),
)


@dataclass(frozen=True)
class Load:
    """Requests that decode at a time, the tokens of each in the KV cache, and their temperature."""

    requests: int
    temperature: float
    context: int = 1000


@dataclass(frozen=True)
class Step:
    """How a step speculates: ``width`` nodes of each request go through a draft forward. The first
    of the forwards is the catch-up. ``kernels``: small ones within graphs. ``operations``: what
    starts outside of graphs, replays included, beside what a plain step starts. ``passes``: float32
    numbers that are read or written for each request and entry of the vocabulary. ``kind``: "tree"
    is dyntree's, also with a chain."""

    drafted: Drafted
    width: int = 0
    kernels: float = 0
    operations: float = 0
    passes: float = 0
    kind: Literal["none", "tree", "chain"] = "none"

    @property
    def forwards(self) -> int:
        return round(self.drafted.forwards)


def tree_step(drafted: Drafted, width: int, head: bool) -> Step:
    """Return a step of dyntree, with the launches that were counted on a stand-in for CUDA.

    Learning was a part of verification's graph then; its own replay is added.
    """
    later = max(round(drafted.forwards) - 1, 0)
    if not drafted.nodes:
        return Step(drafted, width, 3, 31 + 2 + 1, kind="tree")
    growing, walking, looking_up = 7 + 3 * later, 3, 3
    of_head = 7 + 2 * later if head else 0
    kernels = growing + walking + looking_up + of_head
    return Step(drafted, width, kernels, 26 + 5 + 1 + later, kind="tree")


def block_step(drafted: Drafted, width: int, head: bool) -> Step:
    """Return a step of dyntree with a block chain, which is not verified in a graph.

    Drawing was counted on a CPU, as PyTorch dispatches it there. Verification has six kernels, and
    ten operations that prepare them and move and learn outside of graphs.
    """
    like = tree_step(drafted, width, head)
    return replace(
        like,
        kernels=like.kernels + 9 + 10 * like.forwards,
        operations=like.operations + 6 + 10,
        passes=BLOCK_PASSES * drafted.nodes,
    )


def chain_step(drafted: Drafted) -> Step:
    """Return a step of a chain that is drafted in one graph, which is better than vLLM's own."""
    return Step(drafted, 1, 3 * drafted.forwards + 3, 10 + 2, kind="chain")


@dataclass(frozen=True)
class Point:
    """What comes of a step under a load."""

    step: Step
    seconds: float
    tokens_per_second: float
    """Of all requests together."""

    @property
    def nodes(self) -> int:
        return round(self.step.drafted.nodes)


def point(pairing: Pairing, step: Step, load: Load, assumed: Assumed = ASSUMED) -> Point:
    """Return what comes of a step."""
    drafted = step.drafted
    forward = partial(_forward, pairing, load, assumed)
    seconds = forward(pairing.target, 1 + drafted.nodes) + assumed.host
    if step.forwards:
        # The catch-up has a graph for the longest path, whatever was accepted.
        seconds += forward(pairing.draft, 1 + min(drafted.nodes, drafted.forwards))
        seconds += (step.forwards - 1) * forward(pairing.draft, step.width)
    vocabulary = 4 * step.passes * load.requests * pairing.target.vocabulary
    seconds += vocabulary / (roofline.REACHED_BANDWIDTH * pairing.gpu.bandwidth)
    seconds += step.kernels * assumed.captured + step.operations * assumed.outside
    seconds += {"none": 0.0, "tree": assumed.tree, "chain": assumed.chain}[step.kind]
    return Point(step, seconds, load.requests * drafted.tokens / seconds)


def _forward(
    pairing: Pairing, load: Load, assumed: Assumed, shape: Shape, rows_of_request: float
) -> float:
    rows, cached = load.requests * rows_of_request, load.requests * load.context
    launches = (assumed.launches - 1) * shape.layers * roofline.LAUNCH_SECONDS
    attended = rows * load.context
    return launches + forward_seconds(shape, pairing.gpu, rows, cached, pairing.gpus, attended)


def none(pairing: Pairing, load: Load, assumed: Assumed = ASSUMED) -> Point:
    """Return vLLM's step without speculation."""
    return point(pairing, Step(PLAIN), load, assumed)


def best_chain(pairing: Pairing, load: Load, assumed: Assumed = ASSUMED) -> Point:
    """Return vLLM's chain of most tokens per second, of all lengths and ways to verify it."""
    methods = (CHAIN, BLOCK) if load.temperature else (CHAIN,)
    steps = [
        chain_step(drafted.scaled(assumed.share))
        for method in methods
        for drafted in laboratory.by_depth(method, load.temperature)
    ]
    return _best(pairing, steps, load, assumed)


Allowed = Callable[[Drafted], bool]


def best_tree(
    pairing: Pairing,
    load: Load,
    assumed: Assumed = ASSUMED,
    *,
    budgets: Iterable[int] = BUDGETS,
    most_forwards: int = ADAPTIVE_FORWARDS,
) -> Point:
    """Return the tree of most tokens per second, or none, as the adaptive budget chooses it.

    Trees of a budget are cut to fewer nodes where that pays.
    """
    steps = []
    for budget in budgets:
        width = default_shape(budget)[1]
        steps += [
            tree_step(each.scaled(assumed.share), width, pairing.head)
            for each in (CATCH_UP_ALONE, *laboratory.by_depth(TREE, load.temperature))
            if each.nodes <= budget and each.forwards <= most_forwards
        ]
    return _best(pairing, steps, load, assumed)


def best_block(pairing: Pairing, load: Load, assumed: Assumed = ASSUMED) -> Point:
    """Return dyntree's block chain of most tokens per second, or none, with ``block_chains: on``.

    Requests at temperature 0 have trees.
    """
    if not load.temperature:
        return best_tree(pairing, load, assumed)
    # The engine drafts with rows for trees of the budget, of which a chain needs one.
    chains = [
        (drafted.scaled(assumed.share), default_shape(budget)[1])
        for drafted in laboratory.by_depth(BLOCK, load.temperature)
        for budget in BUDGETS
        if drafted.nodes <= budget and drafted.forwards <= ADAPTIVE_FORWARDS
    ]
    steps = [block_step(drafted, width, pairing.head) for drafted, width in chains]
    steps.append(tree_step(CATCH_UP_ALONE, default_shape(BUDGETS[0])[1], pairing.head))
    return _best(pairing, steps, load, assumed)


def whole_trees(
    pairing: Pairing, load: Load, budget: int, assumed: Assumed = ASSUMED
) -> dict[int, Point]:
    """Return trees that are verified whole, by the draft forwards that grow them."""
    width = default_shape(budget)[1]
    return {
        round(each.forwards): point(
            pairing, tree_step(each.scaled(assumed.share), width, pairing.head), load, assumed
        )
        for each in laboratory.by_depth(TREE, load.temperature)
        if round(each.nodes) == budget
    }


def _best(pairing: Pairing, steps: Iterable[Step], load: Load, assumed: Assumed) -> Point:
    points = (point(pairing, step, load, assumed) for step in steps)
    return max(points, key=lambda each: each.tokens_per_second)


@dataclass(frozen=True)
class Compared:
    """The best tree and the best block chain of dyntree under a load, beside no speculation and
    vLLM's best chain."""

    none: Point
    chain: Point
    block: Point
    tree: Point

    @property
    def over_none(self) -> float:
        return self.tree.tokens_per_second / self.none.tokens_per_second

    @property
    def over_chain(self) -> float:
        return self.tree.tokens_per_second / self.chain.tokens_per_second

    @property
    def block_over_none(self) -> float:
        return self.block.tokens_per_second / self.none.tokens_per_second

    @property
    def block_over_chain(self) -> float:
        return self.block.tokens_per_second / self.chain.tokens_per_second


@cache
def compared(pairing: Pairing, load: Load, assumed: Assumed = ASSUMED) -> Compared | None:
    """Return the comparison, or None if the requests do not fit into the memory."""
    if not pairing.fits(load.requests, load.context):
        return None
    return Compared(
        none=none(pairing, load, assumed),
        chain=best_chain(pairing, load, assumed),
        block=best_block(pairing, load, assumed),
        tree=best_tree(pairing, load, assumed),
    )
