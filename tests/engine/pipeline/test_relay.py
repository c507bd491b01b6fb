"""What the last stage of a pipeline tells the earlier ones arrives in the right step, or is left
out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.pp_utils import PPHandler

from dyntree_plugin.engine.pipeline import relay as relays
from dyntree_plugin.engine.pipeline.relay import Decided, Rows, TreeRelay
from dyntree_plugin.engine.step.trees import PlacedTrees

SLOTS, NODES, DEPTH, STAGES = 4, 40, 5, 2
SHAPE = SimpleNamespace(node_budget=NODES, max_depth=DEPTH)
SPARE = SLOTS


class Wire:
    """Stands in for vLLM's handler and for the broadcast, between two relays of one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sent: list[torch.Tensor] = []
        self.generation = np.zeros(SLOTS, dtype=np.int32)
        monkeypatch.setattr(torch.distributed, "broadcast", self._broadcast)

    def handler(self) -> Any:
        stream = torch.cuda.Stream()
        return SimpleNamespace(
            main_stream=stream,
            broadcast_stream=stream,
            broadcast_group=None,
            last_rank=1,
            device=torch.device("cpu"),
            req_idx_gen_np=self.generation,
        )

    def _broadcast(self, tensor: torch.Tensor, source: int, group: Any) -> None:
        if self._sent:
            tensor.copy_(self._sent.pop())
        else:
            self._sent.append(tensor.clone())


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


def batch(slots: list[int], wanted: list[bool] | None = None) -> Any:
    """A batch of requests at ``slots``; those that are not ``wanted`` have prompt left."""
    index = np.array(slots)
    left = np.zeros(len(slots), dtype=int) if wanted is None else 9 * ~np.array(wanted)
    rows = 1 + NODES
    starts = rows * np.arange(len(slots) + 1)
    return SimpleNamespace(
        num_reqs=len(slots),
        num_tokens=int(starts[-1]),
        idx_mapping=torch.from_numpy(index),
        idx_mapping_np=index,
        num_computed_tokens_np=np.full(len(slots), 7),
        num_scheduled_tokens=np.full(len(slots), rows),
        prefill_len_np=7 + rows + left,
        max_seq_len_np=None,
        is_prefilling_np=left > 0,
        query_start_loc=torch.from_numpy(starts),
        cu_num_logits=torch.from_numpy(starts),
    )


def decided(slots: list[int]) -> tuple[torch.Tensor, Any]:
    """A path of each request, and trees of every slot, with the highest bit of a word set."""
    path = torch.tensor([[slot, slot + 1, -1, -1, -1] for slot in slots])
    trees = PlacedTrees(SLOTS, NODES, torch.device("cpu"))
    trees.depths.copy_(torch.randint(1, DEPTH, trees.depths.shape))
    trees.ancestors.copy_(torch.randint(-(2**31), 2**31, trees.ancestors.shape))
    return path, trees


Step = Callable[..., tuple[torch.Tensor, Any]]


@pytest.fixture
def relay(wire: Wire) -> TreeRelay:
    return TreeRelay(wire.handler(), SHAPE, STAGES)


@pytest.fixture
def step(wire: Wire, relay: TreeRelay) -> Step:
    """Run a step of the last stage and of the earlier one; return what was decided."""
    last = TreeRelay(wire.handler(), SHAPE, STAGES)

    def run(slots: list[int], **kwargs: Any) -> tuple[torch.Tensor, Any]:
        path, trees = decided(slots)
        of_step = batch(slots, **kwargs)
        last.send(of_step, path, trees)
        mappings = [torch.arange(of_step.num_tokens) + 1000 * slots[0]]
        relay.receive(of_step, Rows.of(of_step, mappings))
        return path, trees

    return run


def taken(relay: TreeRelay) -> Decided:
    found = relay.take(SPARE)
    assert found is not None
    return found


def test_a_step_is_read_when_as_many_steps_as_stages_have_begun(
    relay: TreeRelay, step: Step
) -> None:
    assert relay.take(SPARE) is None
    path, trees = step([2, 0])
    assert relay.take(SPARE) is None
    later = step([1])
    found = taken(relay)
    assert found.path.equal(path)
    assert found.slots.tolist() == [2, 0]
    assert found.depths.equal(trees.depths[[2, 0]])
    assert found.ancestors.equal(trees.ancestors[[2, 0]])
    assert found.rows.roots.tolist() == [0, 1 + NODES]
    assert found.rows.places[0][0] == 2000
    assert taken(relay).path.equal(later[0])


def test_what_concerns_a_request_that_is_gone_is_left_out(
    wire: Wire, relay: TreeRelay, step: Step
) -> None:
    """Its cache blocks and its slot may be another's by now."""
    relay.take(SPARE)
    path, _ = step([2, 0])
    wire.generation[2] += 1
    relay.take(SPARE)
    found = taken(relay)
    assert found.slots.tolist() == [SPARE, 0]
    assert (found.path[0] == -1).all()
    assert found.path[1].equal(path[1])


def test_a_step_of_prompts_alone_sends_nothing(relay: TreeRelay, step: Step) -> None:
    relay.take(SPARE)
    step([1], wanted=[False])
    relay.take(SPARE)
    assert relay.take(SPARE) is None


def test_requests_in_their_prompt_have_neither_path_nor_tree(relay: TreeRelay, step: Step) -> None:
    relay.take(SPARE)
    step([1, 3], wanted=[False, True])
    relay.take(SPARE)
    found = taken(relay)
    assert found.slots.tolist() == [SPARE, 3]
    assert (found.path[0] == -1).all()


@pytest.mark.parametrize("number", [1, DEPTH + 1])
def test_sampled_tokens_have_the_width_of_a_path(
    number: int, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since 0.33 vLLM refuses to send another number."""
    widths: list[int] = []
    monkeypatch.setattr(
        torch.distributed, "broadcast", lambda sent, src, group: widths.append(sent.shape[1])
    )
    handler, of_step = wire.handler(), batch([1])
    handler.is_last_rank, handler.max_sample_len = True, NODES + 1
    of_step.num_draft_tokens = number - 1
    TreeRelay(handler, SHAPE, STAGES)
    none = torch.zeros(1, dtype=torch.int32)
    PPHandler.broadcast(handler, torch.ones(1, number, dtype=torch.int64), none, none, of_step)
    allowed = getattr(PPHandler, "_sample_len", lambda *_: DEPTH + 1)(handler, of_step)
    assert widths[0] == allowed


def test_every_bit_of_a_tree_survives_the_way() -> None:
    words = 2
    columns = relays.Message.columns(DEPTH, NODES, words)
    packed = torch.arange(3 * columns, dtype=torch.int32).reshape(3, columns)
    message = relays.Message(packed, DEPTH, NODES, words)
    parts = [message.path, message.depths, message.ancestors.flatten(1)]
    assert torch.cat([part.int() for part in parts], dim=1).equal(packed)
