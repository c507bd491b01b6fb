"""Forecast steps of a target with recurrent layers on a GPU, with trees and with vLLM's chains:
python -m benchmarks.gpu_states

The target has the shape of Qwen3-Next (80B, 3B active). Its weights take two H200, so a step has
twice the bandwidth and twice the operations of one; what the GPUs send each other is left out, and
so are drafting and launches. A step takes the longer of two times, that of its bytes and that of
its operations (the roofline of Williams et al., 2009).
"""

from __future__ import annotations

from collections.abc import Iterator

import typer

BYTES = 2
"""Of a weight, an activation and a number of the KV cache, in bfloat16."""
GPUS = 2
BANDWIDTH, OPERATIONS = GPUS * 0.8 * 4.8e12, GPUS * 0.6 * 989e12
"""Bytes and operations per second: assumed shares of the data sheet's."""
REQUESTS, NODES, CONTEXT = (1, 8, 32, 64), (16, 64), 1000

LAYERS, RECURRENT, HIDDEN, KV = 48, 36, 2048, 2 * 2 * 256
EXPERTS, CHOSEN, EXPERT = 512, 10, 3 * HIDDEN * 512
OTHERS = 2.05e9
"""Weights that every step reads: of attention, recurrence, shared experts, routers and logits."""

HEADS, SIZE, WIDTH, CHANNELS = 32, 128, 4, 8192
STATE = 4 * RECURRENT * HEADS * SIZE * SIZE
"""Bytes of a request's states in float32."""
INPUT = BYTES * RECURRENT * CHANNELS
"""Bytes of what the convolutions read of one token."""
GATES = BYTES * RECURRENT * 2 * HEADS


def tree_bytes(nodes: int) -> int:
    """Return the bytes that a request's states take of a step: the forward and the commit read
    them, the commit writes them, and the forward stores what its rows read."""
    return 3 * STATE + 2 * (WIDTH - 1) * INPUT + (nodes + 1) * (INPUT + GATES)


def chain_bytes(nodes: int) -> int:
    """Return the same of vLLM's chains, which write a state after every row."""
    return (1 + nodes + 1) * STATE


def tree_memory(nodes: int) -> int:
    """Return the bytes that a request's states and the inputs of its rows occupy."""
    return STATE + (WIDTH - 1) * INPUT + (nodes + 1) * (INPUT + GATES)


def chain_memory(nodes: int) -> int:
    """Return the same of vLLM's chains: each state has inputs of the drafts beside it."""
    return (nodes + 1) * (STATE + (WIDTH - 1 + nodes) * INPUT)


def others(requests: int, nodes: int) -> tuple[float, float]:
    """Return the bytes of a step but for its states, and its operations.

    The rows choose their experts independently.
    """
    rows = requests * (nodes + 1)
    read = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** rows)
    kept = requests * CONTEXT * (LAYERS - RECURRENT) * KV
    of_rows = 2 * (OTHERS + LAYERS * CHOSEN * EXPERT)
    # Between the rows of a tree: products of keys, of queries, and with the updates; the solve.
    chunk = RECURRENT * HEADS * ((nodes + 1) * 4 * SIZE * SIZE + (nodes + 1) ** 2 * 7 * SIZE)
    return BYTES * (OTHERS + LAYERS * read * EXPERT + kept), rows * of_rows + requests * chunk


def forecast() -> Iterator[list[str]]:
    """Yield what steps move and compute; pairs are of trees, and of chains of as many nodes."""
    yield ["nodes", "requests", "GB but for states", "TFLOP", "GB of states", "ms", "GB held"]
    for nodes in NODES:
        for requests in REQUESTS:
            moved, operations = others(requests, nodes)
            computing = operations / OPERATIONS
            states = [requests * each(nodes) for each in (tree_bytes, chain_bytes)]
            moving = [(moved + each) / BANDWIDTH for each in states]
            held = [requests * each(nodes) for each in (tree_memory, chain_memory)]
            pairs = (
                *((1e-9 * each for each in states),),
                *((1e3 * max(each, computing) for each in moving),),
                *((1e-9 * each for each in held),),
            )
            cells = [", ".join(f"{each:.1f}" for each in pair) for pair in pairs]
            yield [f"{nodes}", f"{requests}", f"{1e-9 * moved:.0f}",
                   f"{1e-12 * operations:.2f}", *cells]  # fmt: skip


def table() -> str:
    """Return the forecast as a Markdown table."""
    head, *lines = (f"| {' | '.join(row)} |" for row in forecast())
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *lines])


if __name__ == "__main__":
    typer.run(lambda: print(table()))  # noqa: T201
