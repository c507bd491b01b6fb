"""What a pipeline's last stage sends to the earlier ones: accepted paths, and the next trees."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pp_utils import PPHandler, compute_need_sampled_mask

from dyntree_plugin.engine.step.trees import PlacedTrees
from dyntree_plugin.tree.shape import TreeShape


@dataclass(frozen=True)
class Message:
    """What a step decided for its R requests, in one tensor int32 [R, columns].

    The columns are the accepted path (D, as in `Walked`), and the depths and ancestor bits of the
    next trees.
    """

    packed: torch.Tensor
    most_depth: int
    nodes: int
    words: int

    @staticmethod
    def columns(most_depth: int, nodes: int, words: int) -> int:
        return most_depth + nodes + (nodes + 1) * words

    @property
    def path(self) -> torch.Tensor:
        """Accepted nodes, int64 [R, D]; -1 after the last."""
        return self.packed[:, : self.most_depth].long()

    @property
    def depths(self) -> torch.Tensor:
        return self.packed[:, self.most_depth :][:, : self.nodes].long()

    @property
    def ancestors(self) -> torch.Tensor:
        bits = self.packed[:, self.most_depth + self.nodes :]
        return bits.reshape(len(bits), self.nodes + 1, self.words)


@dataclass(frozen=True)
class Rows:
    """Where a step's rows are: kept until its message is read.

    ``roots`` int64 [R]: batch row of each root. ``places``: those of each `Keeper`, up to T, the
    number of the batch's rows.
    """

    roots: torch.Tensor
    places: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, batch: InputBatch, places: Iterable[torch.Tensor]) -> Rows:
        """Copy them; the next step overwrites them."""
        last = batch.query_start_loc[1 : batch.num_reqs + 1]
        roots = last.long() - torch.diff(batch.cu_num_logits).long()
        return cls(roots, tuple(each[: batch.num_tokens].clone() for each in places))


@dataclass(frozen=True)
class Decided:
    """A message that has been read: ``path`` and ``rows`` of its step, and its next trees, which
    belong to the request ``slots`` int64 [R]. Requests that are gone have no path, and the spare
    slot."""

    path: torch.Tensor
    rows: Rows
    slots: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor


@dataclass(frozen=True)
class _Pending:
    arrived: Any
    message: Message
    rows: Rows
    index: torch.Tensor
    index_np: np.ndarray[Any, Any]
    wanted: np.ndarray[Any, Any]
    generation: np.ndarray[Any, Any]


class TreeRelay:
    """Sends beside vLLM's `PPHandler`, which sends earlier stages the sampled and draft tokens.

    It uses the handler's stream and communicator, and its rules: nothing is sent for a batch whose
    requests need no sampled token. The message of a step is read when as many steps as there are
    stages have begun. By then no later step of its requests has run, and nobody else has been given
    their cache blocks: vLLM schedules a request again after so many steps, and learns of its end no
    sooner. What is about requests that were removed meanwhile is left out.
    """

    def __init__(self, handler: PPHandler, shape: TreeShape, stages: int) -> None:
        self._handler = handler
        # A request gets a path and one more token. Since 0.33 vLLM sends no others, and checks it.
        handler.max_sample_len = shape.max_depth + 1
        self._sizes = shape.max_depth, shape.node_budget, -(-(shape.node_budget + 1) // 32)
        # One entry for each of the last steps, None where nothing was sent.
        self._queue: deque[_Pending | None] = deque([None] * stages)

    def send(self, batch: InputBatch, path: torch.Tensor | None, trees: PlacedTrees) -> None:
        """Tell the earlier stages what the step decided; call it after vLLM's broadcasts.

        ``path`` int64 [R, D]: accepted nodes; None if no request had drafts.
        """
        if compute_need_sampled_mask(batch) is None:
            return
        handler, index = self._handler, batch.idx_mapping
        most_depth, nodes, words = self._sizes
        bits = trees.ancestors[index].reshape(len(index), (nodes + 1) * words)
        if path is None:
            path = torch.full_like(index, -1)[:, None].expand(-1, most_depth)
        packed = torch.cat([path.int(), trees.depths[index].int(), bits], dim=1)
        with torch.cuda.stream(handler.broadcast_stream):
            handler.broadcast_stream.wait_stream(handler.main_stream)
            packed.record_stream(handler.broadcast_stream)
            torch.distributed.broadcast(packed, handler.last_rank, handler.broadcast_group)

    def receive(self, batch: InputBatch, rows: Rows) -> None:
        """Begin to receive what `send` sends of this step; call it after vLLM's `receive`."""
        wanted = compute_need_sampled_mask(batch)
        if wanted is None:
            return
        handler = self._handler
        columns = Message.columns(*self._sizes)
        with torch.cuda.stream(handler.broadcast_stream):
            handler.broadcast_stream.wait_stream(handler.main_stream)
            packed = torch.empty(batch.num_reqs, columns, dtype=torch.int32, device=handler.device)
            torch.distributed.broadcast(packed, handler.last_rank, handler.broadcast_group)
            arrived = handler.broadcast_stream.record_event()
            packed.record_stream(handler.main_stream)
        index = batch.idx_mapping_np
        self._queue[-1] = _Pending(
            arrived,
            Message(packed, *self._sizes),
            rows,
            batch.idx_mapping,
            index,
            wanted,
            handler.req_idx_gen_np[index],
        )

    def take(self, spare: int) -> Decided | None:
        """Return what the step decided that is now due; None if it sent nothing.

        Call it once at the beginning of every step. ``spare``: slot for requests that are gone.
        """
        pending = self._queue.popleft()
        self._queue.append(None)
        if pending is None:
            return None
        handler, message = self._handler, pending.message
        handler.main_stream.wait_event(pending.arrived)
        path, index = message.path, pending.index
        kept = pending.wanted & (handler.req_idx_gen_np[pending.index_np] == pending.generation)
        if not kept.all():
            there = async_tensor_h2d(kept, device=handler.device)
            path = torch.where(there[:, None], path, -1)
            index = torch.where(there, index, spare)
        return Decided(path, pending.rows, index, message.depths, message.ancestors)
