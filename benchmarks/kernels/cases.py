"""Batches and implementations that the CUDA benchmark runs."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from dyntree_kernels.ancestors import ancestor_bits, unpack_bits
from dyntree_kernels.contracts import BatchRows, TreeArrays
from dyntree_kernels.cuda.attention import Tiling, tree_attention
from dyntree_kernels.cuda.cascade import Cascade, Contexts
from dyntree_kernels.features import LayerFeatures
from dyntree_kernels.reference import masked_attention

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, LAYERS = 32, 8, 128, 16, 32
GROUP = HEADS // KV_HEADS
DTYPE = torch.bfloat16
SCALE = HEAD_SIZE**-0.5
PLAIN = LayerFeatures(SCALE)
_VLLMS_SPLITS = 32
"""Most splits of a context in vLLM's graphs (`flash_attn_max_num_splits_for_cuda_graph`)."""

Arguments: TypeAlias = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]
"""What attention takes before the features of a layer."""

Launch = Callable[[int], None]
"""Attention of one layer, which can be captured in a graph."""


@dataclass(frozen=True)
class Runner:
    """An implementation that is ready to run; `plan` is what it does once per step on the host."""

    launch: Launch
    plan: Callable[[], None] | None = None
    exact: bool = True  # gives tree attention, not a baseline of another meaning
    captured: bool = True


class UnavailableError(RuntimeError):
    """An implementation that this machine or the time left does not allow."""


def heavy_path_tree(nodes: int, generator: torch.Generator) -> list[int]:
    """Parents of a random tree, every node's largest subtree right behind it."""
    picks = torch.rand(nodes, generator=generator)
    parents = [-1, *(int(picks[i] ** 0.5 * i) for i in range(1, nodes))]
    return reordered(parents)


def reordered(parents: list[int]) -> list[int]:
    """The same tree in heavy-path order."""
    children: list[list[int]] = [[] for _ in parents]
    size = [1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        children[parents[node]].append(node)
        size[parents[node]] += size[node]
    order: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(sorted(children[node], key=lambda child: size[child]))
    place = {node: i for i, node in enumerate(order)}
    return [-1, *(place[parents[node]] for node in order[1:])]


@dataclass(frozen=True)
class Batch:
    """Equal `requests`: `rows` nodes behind `context` positions each, over LAYERS caches."""

    rows: int
    context: int
    requests: int
    q: torch.Tensor
    caches: torch.Tensor  # [LAYERS, blocks, Hkv, N, 2 * D]
    table: torch.Tensor
    ctx_lens: torch.Tensor
    qo_indptr: torch.Tensor
    bits: torch.Tensor
    out: torch.Tensor

    @property
    def bytes(self) -> int:
        """What one layer must move: keys and values once, queries in, outputs out."""
        cache = (self.context + self.rows) * KV_HEADS * 2 * HEAD_SIZE
        return self.requests * (cache + 2 * self.rows * HEADS * HEAD_SIZE) * DTYPE.itemsize

    @property
    def operations(self) -> int:
        """Of both products of one layer, over every column: what a causal kernel of `rows` does."""
        return 4 * self.requests * self.rows * (self.context + self.rows) * HEADS * HEAD_SIZE

    def arguments(self, layer: int) -> Arguments:
        return (
            self.q, self.caches[layer], self.table, self.ctx_lens, self.qo_indptr, self.bits,
            self.out,
        )  # fmt: skip

    def error(self) -> float:
        """Largest difference of `out`, of layer 0 and the last request, from the oracle."""
        position = torch.arange(self.context + self.rows, device=self.q.device)
        blocks = self.table[-1, position // BLOCK_SIZE].long()
        keys, values = self.caches[0][blocks, :, position % BLOCK_SIZE].chunk(2, -1)
        mask = torch.nn.functional.pad(
            unpack_bits(self.bits[-self.rows :], self.rows), (self.context, 0), value=True
        )
        expected = masked_attention(self.q[-self.rows :], keys, values, mask, PLAIN)
        return float((self.out[-self.rows :].double() - expected).abs().max())


def make_batch(rows: int, context: int, requests: int = 1, device: str = "cuda") -> Batch:
    g = torch.Generator().manual_seed(rows)
    blocks = requests * -(-(context + rows) // BLOCK_SIZE)
    shape = (LAYERS, blocks + 1, BLOCK_SIZE, KV_HEADS, 2 * HEAD_SIZE)
    caches = torch.randn(shape, dtype=DTYPE, device=device).transpose(2, 3)
    parents = torch.tensor([heavy_path_tree(rows, g) for _ in range(requests)])
    q = torch.randn(requests * rows, HEADS, HEAD_SIZE, dtype=DTYPE, device=device)
    table = torch.randperm(blocks, generator=g).view(requests, -1) + 1
    return Batch(
        rows=rows,
        context=context,
        requests=requests,
        q=q,
        caches=caches,
        table=table.int().to(device),
        ctx_lens=torch.full((requests,), context, dtype=torch.int32, device=device),
        qo_indptr=(torch.arange(requests + 1) * rows).int().to(device),
        bits=ancestor_bits(parents).flatten(0, 1).to(device),
        out=torch.empty_like(q),
    )


def triton(b: Batch, tiles: Tiling | None = None) -> Runner:
    """The kernel that is served, in the tiles that it chooses or in others."""
    return Runner(lambda layer: tree_attention(*b.arguments(layer), PLAIN, tiles=tiles))


def triton_unmasked(b: Batch) -> Runner:
    """The whole of keys and values as context: the same work without a mask."""
    everything, nothing = b.ctx_lens + b.rows, torch.zeros_like(b.bits[:, :1])

    def launch(layer: int) -> None:
        cache = b.caches[layer]
        tree_attention(b.q, cache, b.table, everything, b.qo_indptr, nothing, b.out, PLAIN)

    return Runner(launch, exact=False)


def flashinfer(b: Batch, masked: bool = True) -> Runner:
    variant, attention = _flashinfer()
    runner = attention.FlashInferTreeAttention(
        variant, HEADS, KV_HEADS, BLOCK_SIZE, b.q.device, max_requests=b.requests,
        max_rows=len(b.q), max_blocks=b.table.numel(), masked=masked,
    )  # fmt: skip
    lens = torch.full((b.requests,), b.context + b.rows, dtype=torch.int32)

    def plan() -> None:
        runner.plan(b.qo_indptr.cpu(), lens, b.table)

    def launch(layer: int) -> None:
        runner.run(b.q, b.caches[layer], b.ctx_lens, b.bits, b.out, PLAIN)

    plan()
    return Runner(launch, plan, exact=masked)


def xqa(b: Batch) -> Runner:
    if importlib.util.find_spec("flashinfer") is None:
        raise UnavailableError("flashinfer-python is not installed")
    from dyntree_kernels.cuda.xqa import Xqa, XqaTreeAttention

    module = Xqa(DTYPE, HEAD_SIZE, GROUP, BLOCK_SIZE)
    if not module.is_built():
        raise UnavailableError(f"{module.name} is not built")
    processors = torch.cuda.get_device_properties(b.q.device).multi_processor_count
    runner = XqaTreeAttention(module, KV_HEADS, b.bits.shape[1], processors, b.q.device)
    lens = b.ctx_lens + b.rows

    def launch(layer: int) -> None:
        cache = b.caches[layer]
        runner.run(b.q, cache, b.table, lens, b.qo_indptr, b.bits, b.out, PLAIN, b.rows)

    return Runner(launch)


def cascade(b: Batch, module: str) -> Runner:
    """FlashAttention 3 over the context, and the tree after it; layer 0 prepares both."""
    attention = Cascade(_with_flash_attention(module), 3)
    batch = b.table, b.ctx_lens, b.qo_indptr
    prepared: list[Contexts] = []

    def launch(layer: int) -> None:
        if layer == 0:
            prepared[:] = [attention.contexts(b.q, b.caches[0], *batch, b.rows)]
        attention.run(
            prepared[0], b.q, b.caches[layer], *batch, b.bits, b.out, PLAIN, b.rows
        )  # fmt: skip

    return Runner(launch)


def _with_flash_attention(module: str) -> Any:
    try:
        found = importlib.import_module(module)
        _ = found.flash_attn_varlen_func
    except (ImportError, AttributeError) as error:
        raise UnavailableError(f"{module}: {error}") from error
    return found


def flash_attention(b: Batch, module: str) -> Runner:
    """FlashAttention 3 over all columns, causal, planned once per step, as vLLM does in a graph."""
    library = _with_flash_attention(module)
    everything, longest = b.ctx_lens + b.rows, b.context + b.rows
    planned: list[torch.Tensor] = []

    def launch(layer: int) -> None:
        if layer == 0:
            made = library.get_scheduler_metadata(
                batch_size=b.requests, max_seqlen_q=b.rows, max_seqlen_k=longest,
                num_heads_q=HEADS, num_heads_kv=KV_HEADS, headdim=HEAD_SIZE, causal=True,
                cache_seqlens=everything, qkv_dtype=DTYPE, cu_seqlens_q=b.qo_indptr,
                page_size=BLOCK_SIZE, num_splits=_VLLMS_SPLITS,
            )  # fmt: skip
            planned[:] = [made]
        keys, values = b.caches[layer].transpose(1, 2).chunk(2, 3)
        library.flash_attn_varlen_func(
            b.q, keys, values, max_seqlen_q=b.rows, cu_seqlens_q=b.qo_indptr, max_seqlen_k=longest,
            seqused_k=everything, block_table=b.table, softmax_scale=SCALE, causal=True,
            fa_version=3, out=b.out, scheduler_metadata=planned[0], num_splits=_VLLMS_SPLITS,
        )  # fmt: skip

    return Runner(launch, exact=False)


def xformers(b: Batch) -> Runner:
    if importlib.util.find_spec("xformers") is None:
        raise UnavailableError("xformers is not installed")
    from benchmarks.kernels import xformers_attention

    return Runner(
        lambda layer: xformers_attention.tree_attention(*b.arguments(layer), SCALE), captured=False
    )


@functools.cache
def _flashinfer() -> tuple[Any, Any]:
    """The variant, built if need be, and the module that runs it."""
    if importlib.util.find_spec("flashinfer") is None:
        raise UnavailableError("flashinfer-python is not installed")
    from dyntree_kernels.cuda import flashinfer_attention
    from dyntree_kernels.cuda.flashinfer_variant import Variant

    variant = Variant(DTYPE, DTYPE, HEAD_SIZE)
    if not variant.is_built():
        raise UnavailableError(f"FlashInfer's module {variant.name} is not built")
    return variant, flashinfer_attention


def walk_batch(requests: int, nodes: int, device: str = "cuda") -> tuple[BatchRows, TreeArrays]:
    """Requests that accept the heavy path of their random trees to its end."""
    g = torch.Generator().manual_seed(0)
    rooted = torch.tensor([heavy_path_tree(nodes + 1, g) for _ in range(requests)])
    depths = torch.zeros_like(rooted)
    for node in range(1, nodes + 1):
        depths[:, node] = depths.gather(1, rooted[:, node, None])[:, 0] + 1
    count = torch.full((requests,), nodes)
    trees = TreeArrays(
        rooted[:, 1:] - 1, depths[:, 1:].contiguous(), -torch.rand(requests, nodes, generator=g),
        count, count, count, ancestor_bits(rooted), torch.zeros(requests, 0, 2),
        torch.zeros(requests, nodes, dtype=torch.int8), depths[:, 1:] - 1,
    )  # fmt: skip
    rows = torch.arange(requests * (nodes + 1))
    first = rows[:: nodes + 1]
    packed = torch.stack([rows[:requests], first, count, first, torch.zeros_like(first)], dim=1)
    # A node's row is its token, and the next one, its heaviest child or none, is drawn at each.
    lens = torch.full((requests,), nodes + 1, dtype=torch.int32)
    batch = BatchRows(packed, rows + 1, rows.int(), rows, lens)
    return BatchRows(*(x.to(device) for x in batch[:5])), TreeArrays(*(x.to(device) for x in trees))
