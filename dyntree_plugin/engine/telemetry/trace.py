"""Record an engine's trees in its worker, and read them from outside."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from dyntree_plugin.engine.telemetry.sources import SOURCE_OF
from dyntree_plugin.tree.step import TreeStep

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from dyntree_kernels.contracts import Walked
    from dyntree_plugin.engine.step.trees import TreeStore


class TreeTrace:
    """Keeps every verified tree as plain lists. It waits for the device, so serving is slower."""

    def __init__(self) -> None:
        self._step = 0
        self._kept: list[TreeStep] = []

    def add(self, walked: Walked, batch: InputBatch, trees: TreeStore) -> None:
        """Keep the trees of one step; call it before the next ones replace them."""
        slots = batch.idx_mapping
        nodes = torch.arange(trees.shape.node_budget, device=slots.device)
        rows = (walked.roots[:, None] + 1 + nodes).clamp(max=batch.num_tokens - 1)
        # Every list below waits for the device: only while trees are traced.
        columns = zip(
            batch.req_ids,
            walked.counts.tolist(),  # sync: tracing
            (walked.positions + 1).tolist(),  # sync: tracing
            batch.input_ids[walked.roots].tolist(),  # sync: tracing
            batch.input_ids[rows].tolist(),  # sync: tracing
            trees.parents[slots].tolist(),  # sync: tracing
            trees.values[slots].tolist(),  # sync: tracing
            trees.kinds[slots].tolist(),  # sync: tracing
            walked.path.tolist(),  # sync: tracing
            walked.tokens.tolist(),  # sync: tracing
            strict=False,  # A batch may be padded.
        )
        for request, count, context, root, tokens, parents, values, kinds, path, emitted in columns:
            if count == 0:
                continue
            accepted = [node for node in path if node >= 0]
            self._kept.append(
                TreeStep(
                    request_id=request,
                    step=self._step,
                    context_length=context,
                    root_token=root,
                    tokens=tokens[:count],
                    parents=parents[:count],
                    values=values[:count],
                    sources=[SOURCE_OF[kind] for kind in kinds[:count]],
                    accepted=accepted,
                    emitted=emitted[: len(accepted) + 1],
                )
            )
        self._step += 1

    def take(self) -> list[dict[str, Any]]:
        """Return the trees since the last call, in a form that vLLM sends between processes."""
        kept, self._kept = self._kept, []
        return [asdict(step) for step in kept]


def start_trace(llm: LLM) -> None:
    """Make an engine with trees keep every tree."""
    llm.collective_rpc("trace_trees", args=(True,))


def stop_trace(llm: LLM) -> list[TreeStep]:
    """Stop keeping trees; return those since `start_trace`, in the order of their walks."""
    # Every worker of a tensor-parallel engine sees the same trees.
    kept: list[dict[str, Any]] = llm.collective_rpc("take_trace")[0]
    llm.collective_rpc("trace_trees", args=(False,))
    return [TreeStep(**step) for step in kept]
