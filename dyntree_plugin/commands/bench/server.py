"""Drive a server that runs elsewhere as its users do: streaming, with the openai client."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from dyntree_plugin.commands.loads import counts
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.runs import Engine, Run, latencies_ms

if TYPE_CHECKING:
    import openai

_ANSWER_SECONDS = 600.0


@dataclass
class _Answer:
    asked: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    text: str = ""


def engines(addresses: Sequence[str]) -> list[Engine]:
    """Return an engine for each ``http://host:port`` or ``NAME=http://host:port``.

    Raises:
        ValueError: if an address is invalid, or two have the same name.
    """
    found = []
    for given in addresses:
        name, separator, address = given.partition("=")
        if not separator or "://" in name:
            name, address = given, given
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"--base-url {given!r} must be http://HOST:PORT or NAME=http://…")
        address = address.rstrip("/").removesuffix("/v1")
        found.append(Engine(name=name, kind="server", budget=0, arguments={"base_url": address}))
    if len({engine.name for engine in found}) < len(found):
        raise ValueError("--base-url: two servers have the same name")
    return found


class Client:
    """Sends loads to a server. The answers are texts."""

    def __init__(self, address: str, *, chat: bool) -> None:
        self._address, self._chat = address, chat

    def serve(self, load: Load) -> tuple[Run, list[str]]:
        """Send every request of the load.

        Raises:
            ValueError: if the server refuses a request.
            RuntimeError: if it does not answer, or ends an answer without a token.
        """
        import openai

        before = self._metrics()
        start = time.perf_counter()
        try:
            answers = asyncio.run(self._ask(load))
        except openai.BadRequestError as error:
            raise ValueError(f"{self._address} refuses: {error.message}") from None
        except openai.OpenAIError as error:
            raise RuntimeError(f"{self._address}: {error}") from error
        seconds = time.perf_counter() - start
        after = self._metrics()
        tokens = sum(answer.tokens for answer in answers)
        tpot, ttft = latencies_ms([(a.asked, a.first, a.last, a.tokens) for a in answers])
        run = Run(
            round=0,
            requests=len(answers),
            seconds=seconds,
            output_tokens=tokens,
            tpot_ms=tpot,
            ttft_ms=ttft,
            request_steps=counts.request_steps(before, after, tokens),
            speculation=counts.growth(counts.read(before), counts.read(after)),
            fallbacks=counts.growth_of_fallbacks(counts.fallbacks(before), counts.fallbacks(after)),
        )
        return run, [answer.text for answer in answers]

    async def _ask(self, load: Load) -> list[_Answer]:
        import openai

        room = asyncio.Semaphore(load.concurrency)
        async with openai.AsyncOpenAI(
            base_url=f"{self._address}/v1", api_key="none", timeout=_ANSWER_SECONDS, max_retries=0
        ) as client:
            model = (await client.models.list()).data[0].id

            async def one(number: int) -> _Answer:
                async with room:
                    return await self._stream(client, model, load, number)

            return list(await asyncio.gather(*map(one, range(len(load.requests)))))

    async def _stream(
        self, client: openai.AsyncOpenAI, model: str, load: Load, number: int
    ) -> _Answer:
        prompt: Any = load.requests[number].prompt
        common: dict[str, Any] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": load.sampling(number),
        }
        answer = _Answer(time.perf_counter())
        if self._chat:
            messages: Any = [{"role": "user", "content": prompt}]
            stream = await client.chat.completions.create(messages=messages, **common)
        else:
            stream = await client.completions.create(prompt=prompt, **common)
        async for event in stream:
            if event.usage is not None:
                answer.tokens = event.usage.completion_tokens
            for choice in event.choices:
                piece = choice.delta.content if self._chat else choice.text
                if piece is None:
                    continue  # the role, before the first token
                answer.last = time.perf_counter()
                answer.first = answer.last if answer.first is None else answer.first
                answer.text += piece
        return answer

    def _metrics(self) -> list[Metric]:
        url = f"{self._address}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=60) as page:
                return list(text_string_to_metric_families(page.read().decode()))
        except (OSError, HTTPException, ValueError) as error:
            raise RuntimeError(f"{url} is not a page of metrics: {error}") from error
