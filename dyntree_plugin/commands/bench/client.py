"""Measure a running server with the client of ``vllm bench serve``."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping

import aiohttp
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from vllm.benchmarks.datasets import SampleRequest
from vllm.benchmarks.lib.endpoint_request_func import (
    ASYNC_REQUEST_FUNCS,
    RequestFuncInput,
    RequestFuncOutput,
)

from dyntree_plugin.commands.loads import counts
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.runs import Run, latencies_ms
from dyntree_plugin.escape import escaped
from dyntree_plugin.secrets import hidden

_SILENT_SECONDS = 600.0
"""Most seconds without an answer."""
_MOST_CHARACTERS = 300
"""Limit for a server's message in an error."""


class Client:
    """Sends loads to a server. The answers are texts.

    ``model`` is the name to ask for; None: the first that the server lists. ``headers`` go with
    every request.
    """

    def __init__(
        self,
        address: str,
        *,
        model: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._address, self._model = address, model
        self._headers = dict(headers or {})

    def serve(self, load: Load) -> tuple[Run, list[str]]:
        """Send every request of the load.

        Raises:
            ValueError: if the server refuses a request.
            RuntimeError: if it does not answer, or an answer is incomplete.
        """
        before, outputs, seconds, after = asyncio.run(self._measure(load))
        tokens = sum(output.output_tokens for output in outputs)
        tpot, ttft = latencies_ms([(0.0, o.ttft, o.latency, o.output_tokens) for o in outputs])
        grown = counts.grown(before, after)
        run = Run(
            round=0,
            requests=len(outputs),
            seconds=seconds,
            output_tokens=tokens,
            tpot_ms=tpot,
            ttft_ms=ttft,
            request_steps=counts.request_steps(grown, tokens),
            speculation=counts.speculation(grown),
            fallbacks=counts.fallbacks(grown),
        )
        return run, [output.generated_text for output in outputs]

    async def _measure(
        self, load: Load
    ) -> tuple[list[Metric], list[RequestFuncOutput], float, list[Metric]]:
        """Return the metrics before, the outputs, the seconds that they took, and the metrics."""
        refusals: list[Exception] = []

        async def note(response: aiohttp.ClientResponse) -> None:
            # vLLM's client keeps the status of a refusal, and drops the server's message.
            if not response.ok:
                refusals.append(_refusal(response, self._shown(_message(await response.text()))))

        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
            raise_for_status=note,
            timeout=aiohttp.ClientTimeout(total=None, sock_read=_SILENT_SECONDS),
            trust_env=True,
        ) as session:
            try:
                before = await self._metrics(session)
                model = self._model or await self._first_model(session)
                start = time.perf_counter()
                outputs = await self._send(session, load, model)
                seconds = time.perf_counter() - start
                return before, outputs, seconds, await self._metrics(session)
            except (OSError, RuntimeError, ValueError, aiohttp.ClientError) as error:
                first = refusals[0] if refusals else RuntimeError(f"{self._address}: {error}")
                raise type(first)(self._shown(str(first))) from error

    def _shown(self, text: str) -> str:
        """Return a text on one line and without secrets; a server may repeat its key."""
        keys = [part for value in self._headers.values() for part in (value, *value.split())]
        return escaped(hidden(" ".join(text.split()), keys))

    async def _send(
        self, session: aiohttp.ClientSession, load: Load, model: str
    ) -> list[RequestFuncOutput]:
        """Send the requests, and return their outputs in the same order."""
        room = asyncio.Semaphore(load.concurrency)

        async def one(request: SampleRequest) -> RequestFuncOutput:
            async with room:
                return await self._stream(session, model, request)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(request)) for request in _requests(load)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _stream(
        self, session: aiohttp.ClientSession, model: str, request: SampleRequest
    ) -> RequestFuncOutput:
        asked = RequestFuncInput(
            prompt=request.prompt,
            api_url=f"{self._address}/v1/completions",
            prompt_len=request.prompt_len,
            output_len=request.expected_output_len,
            model=model,
            extra_headers=self._headers,
            extra_body=request.request_overrides,
        )
        output = await ASYNC_REQUEST_FUNCS["openai"](asked, session)
        if not output.success:
            lines = output.error.strip().splitlines() or ["no answer"]
            raise RuntimeError(lines[-1])
        if not output.output_tokens:
            raise RuntimeError("a stream has ended without its number of tokens")
        return output

    async def _metrics(self, session: aiohttp.ClientSession) -> list[Metric]:
        page = await self._page(session, "/metrics")
        try:
            return list(text_string_to_metric_families(page))
        except ValueError as error:
            raise ValueError(f"/metrics is not a page of metrics: {error}") from None

    async def _first_model(self, session: aiohttp.ClientSession) -> str:
        page = await self._page(session, "/v1/models")
        try:
            return str(json.loads(page)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ValueError("/v1/models lists no model; give a --model") from None

    async def _page(self, session: aiohttp.ClientSession, path: str) -> str:
        async with session.get(self._address + path) as response:
            if not response.ok:
                raise ValueError(f"{path} is not there")
            return await response.text()


def _requests(load: Load) -> list[SampleRequest]:
    return [
        SampleRequest(
            prompt=request.prompt if isinstance(request.prompt, str) else list(request.prompt),
            prompt_len=0,  # the server counts it
            expected_output_len=load.max_tokens,
            request_overrides=load.sampling(number),
        )
        for number, request in enumerate(load.requests)
    ]


def _refusal(response: aiohttp.ClientResponse, said: str) -> Exception:
    """Return the error for a failed request, with the server's message.

    A status of 400 to 499 is the user's mistake.
    """
    said = (said or response.reason or "")[:_MOST_CHARACTERS]
    message = f"{response.url} answers {response.status}: {said}"
    if response.status in (401, 403):
        message += "; OPENAI_API_KEY or a header (--header) gives a key"
    return ValueError(message) if response.status < 500 else RuntimeError(message)


def _message(text: str) -> str:
    """Return the message of an error in JSON, or the first line of a text."""
    try:
        body = json.loads(text)
        error = body.get("error", body)
        if isinstance(error, Mapping):
            error = error.get("message") or error.get("detail")
        return str(error or "")
    except (ValueError, AttributeError):
        return next(iter(text.strip().splitlines()), "")
