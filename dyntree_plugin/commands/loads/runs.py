"""Describe an engine, and its run over a load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["plain", "chain", "static tree", "dynamic tree"]


class Record(BaseModel):
    """A part of a result file: it does not change. Fields of other versions are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Engine(Record):
    """An engine: its most draft tokens per step, and its arguments for ``LLM``."""

    name: str
    kind: Kind
    budget: int
    arguments: dict[str, Any]


class Speculation(Record):
    """Counts of speculation; ``drafts`` are verified chains or trees."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Fallbacks(Record):
    """Decoding steps of single requests, with trees, and with chains or no tree.

    ``by_reason``: the latter by the reasons of `dyntree_fallback_steps`.
    """

    request_steps: int = 0
    by_reason: dict[str, int] = Field(default_factory=dict)


class Run(Record):
    """One engine's work on one cell in one round.

    ``tpot_ms``: time per output token after the first, over all requests, in steps that read no
    prompt: without speculation, answers of one length end together and wait for none. ``ttft_ms``:
    mean time to the first token. ``steps``: engine steps without a prompt; ``step_ms``: their mean
    time; ``stages_ms``: the worker's share of it by stage, for an engine in another process over
    all steps. ``request_steps``: steps of all single requests after their first tokens; 0 if
    unknown. They belong to ``output_tokens``, which has no token after the end of an answer;
    ``speculation`` may count such tokens. ``tokens_per_step_error``: standard error, over requests,
    of the tokens per such step; 0 if unknown. ``told``: as in `Load`; no result file has it.
    """

    round: int
    requests: int
    seconds: float
    output_tokens: int
    tpot_ms: float
    ttft_ms: float
    steps: int = 0
    step_ms: float = 0.0
    stages_ms: dict[str, float] = Field(default_factory=dict)
    request_steps: int = 0
    tokens_per_step_error: float = 0.0
    speculation: Speculation = Speculation()
    fallbacks: Fallbacks = Fallbacks()
    told: Any = Field(default=None, exclude=True)


def latencies_ms(
    requests: Sequence[tuple[float, float | None, float, int]],
) -> tuple[float, float]:
    """Compute ``tpot_ms`` and ``ttft_ms`` of a `Run`.

    ``requests``: for each, the seconds at which it was sent and got its first token, and the
    seconds and tokens of its later steps that count.

    Raises:
        RuntimeError: if a request got none.
    """
    spent, later, waited = 0.0, 0, 0.0
    for asked, first, seconds, tokens in requests:
        if first is None:
            raise RuntimeError("a request has ended without a token")
        spent += seconds
        later += tokens
        waited += first - asked
    return 1e3 * spent / max(later, 1), 1e3 * waited / len(requests)
