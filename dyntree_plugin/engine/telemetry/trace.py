"""Look at an engine's trees: a recorder in the worker, and how to reach it from outside."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from dyntree_plugin.tree.step import TreeStep

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from dyntree_plugin.engine.step.trees import TreeStore
    from dyntree_plugin.engine.step.verify import Verification


class TreeTrace:
    """Keeps every verified tree as plain lists. Waits for the device: not for serving at speed."""

    def __init__(self) -> None:
        self._step = 0
        self._kept: list[TreeStep] = []

    def add(self, verification: Verification, batch: InputBatch, trees: TreeStore) -> None:
        """Keep the trees of one step; call it before the next ones replace them."""
        slots = batch.idx_mapping
        nodes = torch.arange(trees.shape.node_budget, device=slots.device)
        rows = (verification.roots[:, None] + 1 + nodes).clamp(max=batch.num_tokens - 1)
        # Every list below waits for the device: only while trees are traced.
        columns = zip(
            batch.req_ids,
            verification.counts.tolist(),  # sync: tracing
            (verification.positions + 1).tolist(),  # sync: tracing
            batch.input_ids[verification.roots].tolist(),  # sync: tracing
            batch.input_ids[rows].tolist(),  # sync: tracing
            trees.parents[slots].tolist(),  # sync: tracing
            trees.values[slots].tolist(),  # sync: tracing
            verification.path.tolist(),  # sync: tracing
            verification.tokens.tolist(),  # sync: tracing
            strict=False,  # a batch may be padded behind its requests
        )
        for request, count, context, root, tokens, parents, values, path, emitted in columns:
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
                    accepted=accepted,
                    emitted=emitted[: len(accepted) + 1],
                )
            )
        self._step += 1

    def take(self) -> list[dict[str, Any]]:
        """What was kept since the last call, as vLLM can send it between processes."""
        kept, self._kept = self._kept, []
        return [asdict(step) for step in kept]


def start_trace(llm: LLM) -> None:
    """Have an engine with trees keep every tree from now on."""
    llm.collective_rpc("trace_trees", args=(True,))


def stop_trace(llm: LLM) -> list[TreeStep]:
    """End what `start_trace` began: the trees since then, in the order of their verification."""
    # Every worker of a tensor-parallel engine sees the same trees.
    kept: list[dict[str, Any]] = llm.collective_rpc("take_trace")[0]
    llm.collective_rpc("trace_trees", args=(False,))
    return [TreeStep(**step) for step in kept]
