"""Steps near a request's end: trees that nobody needs, and blocks that the last step completes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from dyntree_plugin.engine.scheduler import AsyncTreeScheduler, TreeScheduler

SLOTS = 4


def scheduler_of(kind: type[Any], *requests: Request) -> Any:
    scheduler: Any = object.__new__(kind)
    scheduler.requests = {request.request_id: request for request in requests}
    scheduler.defer_block_free, scheduler._inflight_prefills = False, set()
    scheduler.use_v2_model_runner, scheduler.num_sampled_tokens_per_step = False, 1
    scheduler._spec_token_placeholders = [-1] * SLOTS
    return scheduler


def decoding(name: str, output: int, max_tokens: int) -> Request:
    """Return a request that has read its prompt of two tokens, and got ``output`` tokens."""
    request = Request(name, [1, 2], SamplingParams(max_tokens=max_tokens), None)
    request.status = RequestStatus.RUNNING
    request.append_output_token_ids([7] * output)
    request.num_computed_tokens = request.num_tokens - 1
    return request


def schedule(scheduler: Any, *names: str, drafts: int = 0) -> Any:
    """Do what follows vLLM's choice of a step's requests; return the step."""
    step: Any = SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(names, 1 + drafts),
        scheduled_spec_decode_tokens={name: [-1] * drafts for name in names},
        num_spec_tokens_to_schedule=SLOTS,
        has_structured_output_requests=False,
        pending_structured_output_tokens=False,
    )
    scheduler._update_after_schedule(step)
    return step


@pytest.mark.parametrize(("left", "nodes"), [(1, 0), (2, 0), (3, SLOTS)])
def test_a_step_drafts_nothing_for_a_request_that_then_takes_one_more_token(
    left: int, nodes: int
) -> None:
    """The step itself gives a token. Control: more tokens are left."""
    request = decoding("a", 1, max_tokens=1 + left)
    step = schedule(scheduler_of(AsyncTreeScheduler, request), "a")
    assert step.num_spec_tokens_to_schedule == nodes
    assert len(request.spec_token_ids) == nodes


def test_each_step_under_way_gives_a_token() -> None:
    request = decoding("a", 1, max_tokens=4)
    scheduler = scheduler_of(AsyncTreeScheduler, request)
    assert schedule(scheduler, "a").num_spec_tokens_to_schedule == SLOTS
    assert schedule(scheduler, "a", drafts=SLOTS).num_spec_tokens_to_schedule == 0
    assert request.spec_token_ids == []


def test_one_request_that_goes_on_is_enough_for_trees() -> None:
    ending, going = decoding("a", 1, max_tokens=2), decoding("b", 1, max_tokens=20)
    step = schedule(scheduler_of(AsyncTreeScheduler, ending, going), "a", "b")
    assert step.num_spec_tokens_to_schedule == SLOTS
    assert (len(ending.spec_token_ids), len(going.spec_token_ids)) == (0, SLOTS)


@pytest.mark.parametrize(("output", "nodes"), [(1, SLOTS), (2, 0)])
def test_a_synchronous_scheduler_knows_the_last_steps_tokens(output: int, nodes: int) -> None:
    request = decoding("a", output, max_tokens=3)
    scheduler = scheduler_of(TreeScheduler, request)
    scheduler._grammars = SimpleNamespace(take=lambda *_: None)
    scheduler.structured_output_manager = SimpleNamespace(validate_tokens=lambda _, ids: ids)
    drafts = SimpleNamespace(req_ids=["a"], draft_token_ids=[[5] * SLOTS])
    scheduler.update_draft_token_ids(drafts)
    assert len(request.spec_token_ids) == nodes


@pytest.mark.parametrize(
    ("kind", "accepted", "resumable"),
    [(TreeScheduler, 9, True), (AsyncTreeScheduler, 3, False), (AsyncTreeScheduler, 9, True)],
)
def test_blocks_that_the_last_step_completes_are_cached(
    kind: type[Any], accepted: int, resumable: bool
) -> None:
    """The last token has no KV, and tokens that were accepted after it are not the request's."""
    cached: list[int] = []
    request = decoding("a", 1, max_tokens=4)
    request.resumable = resumable
    scheduler = scheduler_of(kind, request)
    scheduler.max_model_len, scheduler._emitted, scheduler._counts = 1000, {}, None
    scheduler.need_mamba_block_aligned_split = False
    scheduler._rows, scheduler._enqueue_waiting_request = {"a": 0}, lambda _: None
    scheduler.num_waiting_for_streaming_input, request.streaming_queue = 0, None
    scheduler.kv_cache_manager = SimpleNamespace(
        cache_blocks=lambda _, tokens: cached.append(tokens)
    )
    schedule(scheduler, "a", drafts=16)
    request.num_computed_tokens -= 16 - accepted
    request.num_output_placeholders = max(request.num_output_placeholders - 16 + accepted, 0)
    _, stopped = scheduler._update_request_with_output(request, [7] * (1 + accepted))
    assert stopped
    scheduler._handle_stopped_request(request)
    assert cached[-1] == request.num_tokens - 1 == 5
