"""Requests with limits of their own on the nodes of their trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from comparison import Outputs
from engine_process import Request, Result, Run


def limited(requests: Sequence[Request], *limits: int | None) -> Run:
    """Give the requests these limits in turn; None for no limit."""
    of_requests = (limits[number % len(limits)] for number in range(len(requests)))
    return Run(
        [_with(request, limit) for request, limit in zip(requests, of_requests, strict=True)]
    )


def check_tokens(requests: Sequence[Request], result: Result, plain: Outputs) -> None:
    """Assert that each of the ``requests`` got the tokens that it gets without limit and tree."""
    for request, output in zip(requests, result.outputs, strict=True):
        assert output is not None
        assert output.tokens == plain[request.key].tokens, request


def _with(request: Request, limit: int | None) -> Request:
    if limit is None:
        return request
    return replace(request, params={**request.params, "extra_args": {"dyntree_nodes": limit}})
