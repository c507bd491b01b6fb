"""Compare answers bit by bit with those of requests that allow no nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine_process import Output, Request, Result, Run

from dyntree_plugin.admission.node_limit import NAME


def without_nodes(requests: Sequence[Request]) -> list[Request]:
    return [replace(r, params={**r.params, "extra_args": {NAME: 0}}) for r in requests]


def differing(run: Run, found: Result, plain: Run, plain_found: Result) -> list[str]:
    """Return the requests of whose answers any bit differs from that of the plain ones."""
    pairs = zip(plain.requests, plain_found.outputs, strict=True)
    wanted = {request.key: _bits(output) for request, output in pairs}
    requests = zip(without_nodes(run.requests), found.outputs, strict=True)
    return [each.key for each, output in requests if _bits(output) != wanted[each.key]]


def _bits(output: Output | None) -> Any:
    """Return tokens and logprobs. Those of the best tokens show all bits of a row's logits, over
    which they are normed."""
    assert output is not None
    return output.tokens, output.logprobs, output.prompt_logprobs
