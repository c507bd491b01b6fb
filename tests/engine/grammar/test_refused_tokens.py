"""A request whose grammar refuses a token ends as it does when its tokens come one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from dyntree_plugin.engine.grammar.scheduled import TreeGrammars
from dyntree_plugin.engine.scheduler import AsyncTreeScheduler, TreeScheduler

THOUGHT, ANSWER, STOP, END, REFUSED = range(5)
SEEDS = range(100)


class LastMarker:
    """A text is a thought from its start on; of several markers the last one says where it is."""

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        markers = [token for token in input_ids if token in (THOUGHT, ANSWER)]
        return markers[-1:] == [ANSWER]

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: object) -> bool:
        return self.is_reasoning_end(input_ids)


class Choosy:
    """A grammar that `END` completes, and that refuses a list which goes on, as guidance does."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        if END in self.text:
            return True
        self.text += tokens
        return REFUSED not in tokens and END not in tokens[:-1]


def begun(thinks: bool, drawn: random.Random) -> Request:
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="any"),
        stop_token_ids=[STOP],
        max_tokens=drawn.randrange(1, 16),
    )
    request = Request("request", [7], params, None)
    request.status = RequestStatus.RUNNING
    request.num_output_placeholders = 99
    structured: Any = request.structured_output_request
    structured.grammar = Choosy()
    if thinks:
        structured.reasoner = LastMarker()
    return request


def ended(
    kind: type[Scheduler], request: Request, steps: Sequence[Sequence[int]], thinks: bool
) -> tuple[object, ...]:
    """Do with the tokens of ``steps`` what vLLM's ``update_from_output`` does."""
    manager: Any = object.__new__(StructuredOutputManager)
    manager.enable_in_reasoning, manager.reasoner_cls = False, LastMarker if thinks else None
    scheduler: Any = object.__new__(kind)
    scheduler.max_model_len = 99
    scheduler.need_mamba_block_aligned_split = False
    scheduler.kv_cache_manager = SimpleNamespace(cache_blocks=lambda *of: None)
    scheduler._grammars = TreeGrammars(manager)
    # Nothing is counted.
    scheduler._counts, scheduler._rows, scheduler._emitted = None, {request.request_id: 0}, {}
    asked = (
        scheduler._grammars if issubclass(kind, (TreeScheduler, AsyncTreeScheduler)) else manager
    )
    emitted: list[int] = []
    for step in steps:
        tokens, stopped = scheduler._update_request_with_output(request, [*step], is_stale=False)
        if not asked.accept_tokens(request, tokens):
            request.status, stopped = RequestStatus.FINISHED_ERROR, True
        emitted += tokens
        if stopped:
            break
    structured: Any = request.structured_output_request
    assert emitted == [*request.output_token_ids]
    read = structured.grammar.text, structured.reasoning_ended
    return emitted, request.status, request.stop_reason, request.num_output_placeholders, *read


def both(kind: type[Scheduler], one_by_one: type[Scheduler], seed: int) -> list[tuple[Any, ...]]:
    """Return how a request ends whose tokens come in steps of several, and one by one."""
    drawn = random.Random(seed)
    tokens = drawn.choices(range(8), weights=[2, 2, 1, 1, 1, 9, 9, 9], k=16)
    cuts = sorted(drawn.sample(range(1, 16), 4))
    steps = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, 16], strict=True)]
    thinks = drawn.random() < 0.5
    found = []
    for each, lists in ((kind, steps), (one_by_one, [[token] for token in tokens])):
        request = begun(thinks, random.Random(seed))
        found.append(ended(each, request, lists, thinks))
    return found


@pytest.mark.parametrize(
    ("kind", "stock"), [(TreeScheduler, Scheduler), (AsyncTreeScheduler, AsyncScheduler)]
)
def test_a_request_ends_as_it_does_without_speculation(
    kind: type[Scheduler], stock: type[Scheduler]
) -> None:
    ends = set()
    for seed in SEEDS:
        in_steps, one_by_one = both(kind, stock, seed)
        assert in_steps == one_by_one, seed
        ends.add(one_by_one[1])
    assert {RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_STOPPED} < ends


def test_vllms_own_scheduler_lets_tokens_stand_after_the_refused_one() -> None:
    """Its lists of drafts are cut where a grammar refuses a token; trees cannot be."""
    pairs = [both(Scheduler, Scheduler, seed) for seed in SEEDS]
    assert any(len(a[0]) > len(b[0]) for a, b in pairs if b[1] == RequestStatus.FINISHED_ERROR)
