"""Time the CPU kernels.

Prints the lower quartile of the milliseconds per layer of tree attention, next to gathering the
cache into a dense tensor for torch's attention with a mask, and of a KV move over all layers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from dyntree_kernels.ancestors import ancestor_bits, unpack_bits
from dyntree_kernels.cpu.attention import tree_attention
from dyntree_kernels.cpu.kv_move import KVMover
from dyntree_kernels.features import LayerFeatures

_SHAPES = (  # query heads, KV heads, head size, context, nodes
    (8, 4, 32, 500, 17),
    (14, 2, 64, 1024, 33),
    (16, 8, 128, 1024, 17),
    (32, 8, 128, 2048, 64),
    (32, 8, 128, 2048, 256),
)
_BLOCK = 128


def _milliseconds(run: Callable[[], None]) -> float:
    run()
    times: list[float] = []
    deadline = time.perf_counter() + 0.5
    while len(times) < 8 or time.perf_counter() < deadline:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 4] * 1e3


def _attention(
    heads: int, kv_heads: int, d: int, ctx: int, nodes: int, dtype: torch.dtype
) -> tuple[float, float]:
    blocks = -(-(ctx + nodes) // _BLOCK)
    key, value = torch.randn(blocks, kv_heads, 2 * _BLOCK, d).to(dtype).chunk(2, 2)
    parents = (torch.rand(1, nodes) * torch.arange(nodes)).long()
    parents[0, 0] = -1
    bits = ancestor_bits(parents)[0]
    table = torch.randperm(blocks, dtype=torch.int32)
    q, scale = torch.randn(nodes, heads, d).to(dtype), d**-0.5
    out = torch.empty_like(q)

    def tree() -> None:
        tree_attention(
            q, key, value, "vec", table[None], torch.tensor([ctx]), torch.tensor([0, nodes]), bits,
            out, LayerFeatures(scale),
        )  # fmt: skip

    def dense() -> None:
        packed = key.as_strided((blocks, kv_heads, d, _BLOCK), (*key.stride()[:2], _BLOCK, 1))
        k = packed[table].permute(1, 0, 3, 2).reshape(kv_heads, -1, d)[:, : ctx + nodes]
        v = value[table].transpose(0, 1).reshape(kv_heads, -1, d)[:, : ctx + nodes]
        mask = torch.nn.functional.pad(unpack_bits(bits, nodes), (ctx, 0), value=True)
        group = heads // kv_heads
        rows = q.view(nodes, kv_heads, group, d).permute(1, 2, 0, 3).reshape(kv_heads, -1, d)
        torch.nn.functional.scaled_dot_product_attention(
            rows[None], k[None], v[None], mask.repeat(group, 1), scale=scale
        )

    return _milliseconds(tree), _milliseconds(dense)


def _move(layers: int, kv_heads: int, d: int, dtype: torch.dtype) -> float:
    halves = [
        torch.zeros(8, kv_heads, 2 * _BLOCK, d, dtype=dtype).chunk(2, 2) for _ in range(layers)
    ]
    mover = KVMover([key for key, _ in halves], [value for _, value in halves], "vec")
    src = torch.arange(12)[None] * 3 + 14
    dst = torch.arange(12)[None] + 11
    return _milliseconds(lambda: mover(src, dst))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    types = ("float32", "bfloat16", "float16")
    parser.add_argument("dtype", nargs="?", choices=types, default=types[0], help="of the cache")
    dtype = getattr(torch, parser.parse_args(arguments).dtype)
    write = sys.stdout.write
    write(f"{dtype}, {torch.get_num_threads()} threads, ms\n")
    for shape in _SHAPES:
        tree, dense = _attention(*shape, dtype)
        heads, kv_heads, d, ctx, nodes = shape
        name = f"H{heads}/{kv_heads} D{d} context {ctx} nodes {nodes}"
        write(f"{name:40} tree {tree:9.3f}  gather + dense {dense:9.3f}\n")
    for layers, kv_heads, d in ((6, 4, 32), (32, 8, 128)):
        moved = _move(layers, kv_heads, d, dtype)
        write(f"move 12 rows, {layers} layers, {kv_heads} KV heads, D{d}: {moved:.3f}\n")
