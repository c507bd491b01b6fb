"""Clients of a served model: they ask, read streams, disconnect in mid-stream, and reconnect."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import openai
import workload
from engine_process import Request

ABORTED = 0.2
"""Share of the requests that the client aborts in mid-stream."""
NOT_STREAMED = {"prompt_logprobs", "logprob_token_ids"}
"""Parameters that vLLM's API refuses in a stream, or accepts only together with others."""
LIFE = 20
"""Average number of requests before a client reconnects."""

_OWN = {"temperature", "top_p", "max_tokens", "seed", "stop", "n", "logprobs", "presence_penalty",
        "frequency_penalty", "logit_bias"}  # fmt: skip
"""Parameters that `openai` takes by name. The others go into ``extra_body``."""


@dataclass
class Received:
    """Tokens by sequence, and whether the client aborted the request."""

    request: Request
    tokens: list[list[int]]
    aborted: bool = False


@dataclass
class Log:
    """The answers and errors that the clients saw."""

    received: list[Received] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    restarts: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(tokens) for each in self.received for tokens in each.tokens)

    @property
    def aborted(self) -> int:
        return sum(each.aborted for each in self.received)


def questions() -> list[Request]:
    """Return the requests: all that can be streamed, and some with long shared prefixes."""
    served = [
        *workload.EVERYTHING,
        *workload.DEMANDING,
        *workload.LONG_PROMPTS,
        *workload.long_each_kind(range(140, 152), 300),
    ]
    return [
        Request(
            each.prompt, {**each.params, "max_tokens": each.params["max_tokens"] or 24}, each.keep
        )
        for each in served
        if not each.params.keys() & NOT_STREAMED
    ]


def ask_anew(pick: random.Random, asked: Sequence[Request]) -> Request:
    """Pick a request. Half of the seeded ones get a new seed."""
    request = pick.choice(asked)
    if "seed" not in request.params or pick.random() < 0.5:
        return request
    return Request(request.prompt, {**request.params, "seed": pick.getrandbits(62)}, request.keep)


async def soak(
    address: str, prompts: Mapping[str, list[int]], clients: int, seconds: float, seed: int = 0
) -> Log:
    """Let ``clients`` clients ask for ``seconds``. ``prompts`` holds tokens by `prompt_key`."""
    log = Log()
    end = time.monotonic() + seconds
    await asyncio.gather(
        *(_client(address, prompts, random.Random(f"{seed} {n}"), end, log) for n in range(clients))
    )
    return log


async def _client(
    address: str,
    prompts: Mapping[str, list[int]],
    pick: random.Random,
    end: float,
    log: Log,
) -> None:
    asked = questions()
    while time.monotonic() < end:
        async with openai.AsyncOpenAI(
            base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            (model,) = (await client.models.list()).data
            for _ in range(pick.randrange(1, 2 * LIFE)):
                if time.monotonic() > end:
                    return
                try:
                    await _ask(client, model.id, ask_anew(pick, asked), prompts, pick, log)
                except (openai.OpenAIError, OSError) as error:
                    log.errors.append(f"{type(error).__name__}: {error}")
        log.restarts += 1


async def _ask(
    client: openai.AsyncOpenAI,
    model: str,
    request: Request,
    prompts: Mapping[str, list[int]],
    pick: random.Random,
    log: Log,
) -> None:
    own = {name: value for name, value in request.params.items() if name in _OWN}
    others = {name: value for name, value in request.params.items() if name not in _OWN}
    leave_after = pick.randrange(1, 12) if pick.random() < ABORTED else None
    received = Received(request, [[] for _ in range(request.params.get("n", 1))])
    stream: Any = await client.completions.create(
        model=model,
        prompt=prompts[prompt_key(request)],
        stream=True,
        extra_body={**others, "return_token_ids": True},
        **own,
    )
    pieces = 0
    async for event in stream:
        for choice in event.choices:
            received.tokens[choice.index] += choice.token_ids or []
            pieces += 1
        if leave_after is not None and pieces >= leave_after:
            received.aborted = True
            break
    with suppress(openai.OpenAIError, OSError):
        await stream.close()
    log.received.append(received)


def prompt_key(request: Request) -> str:
    return f"{request.keep} {request.prompt}"
