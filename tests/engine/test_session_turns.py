"""A session takes its input in pieces, and a turn ends within an accepted path."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from dyntree_plugin.engine.scheduler import TreeScheduler

PROMPT, FIRST_TURN, SECOND_PIECE = [1, 2, 3, 4], [5, 6, 7], [8, 9]


def next_turn(scheduler_type: type[Scheduler], computed: int) -> Request:
    """Return the session when its second turn begins.

    ``computed`` is the number of tokens with KV at the end of the first turn.
    """
    params = SamplingParams(max_tokens=len(FIRST_TURN))
    session = Request("session", [*PROMPT], params, None, resumable=True)
    session.streaming_queue = deque()
    session.append_output_token_ids(FIRST_TURN)
    session.num_computed_tokens = computed
    session.status = RequestStatus.FINISHED_LENGTH_CAPPED
    scheduler: Any = object.__new__(scheduler_type)
    scheduler.num_waiting_for_streaming_input = 0
    scheduler.hash_block_size, scheduler.log_stats = 16, False
    scheduler.kv_cache_manager = SimpleNamespace(cache_blocks=lambda *_: None)
    scheduler._enqueue_waiting_request = lambda request: None
    assert not scheduler._handle_stopped_request(session)
    update = Request("session", [*SECOND_PIECE], params, None, resumable=True)
    scheduler._update_request_as_session(session, StreamingUpdate.from_request(update))
    return session


WHOLE = [*PROMPT, *FIRST_TURN[:-1], *SECOND_PIECE]
"""vLLM drops a turn's last token, which has no KV yet."""


@pytest.mark.parametrize("accepted_behind_the_end", [0, 1, 5])
def test_what_a_tree_had_accepted_behind_the_end_is_not_taken_for_computed(
    accepted_behind_the_end: int,
) -> None:
    computed = len(PROMPT + FIRST_TURN) - 1 + accepted_behind_the_end
    session = next_turn(TreeScheduler, computed)
    assert list(session.all_token_ids) == WHOLE
    assert session.num_computed_tokens == len(WHOLE) - len(SECOND_PIECE)


def test_vllms_own_scheduler_takes_it_for_computed() -> None:
    """If vLLM's scheduler no longer does this, ours need not correct it."""
    session = next_turn(Scheduler, len(PROMPT + FIRST_TURN) + 4)
    assert list(session.all_token_ids) != WHOLE
    assert session.num_computed_tokens > session.num_tokens
