"""Compare the outputs of two engines, and say where they differ."""

from __future__ import annotations

from collections.abc import Mapping

from engine_process import Output, Request, Result, Run

Outputs = Mapping[str, Output]
"""Outputs by request key."""
TOLERANCE = 1e-4
"""Largest accepted difference of a logprob."""


def by_request(run: Run, result: Result) -> Outputs:
    """Return the outputs of a run by request key, without those of aborted requests."""
    pairs = zip(run.requests, result.outputs, strict=True)
    return {request.key: output for request, output in pairs if output is not None}


def mismatches(run: Run, result: Result, plain: Outputs) -> list[tuple[Request, Output, Output]]:
    """Return (request, output, plain output) of every request whose output differs from
    ``plain``."""
    pairs = zip(run.requests, result.outputs, strict=True)
    return [
        (request, output, plain[request.key])
        for request, output in pairs
        if output is not None and not same(output, plain[request.key])
    ]


def same(first: Output, second: Output) -> bool:
    """Return whether prompts, tokens, texts and finish reasons are equal."""
    return (first.prompt, first.tokens, first.texts, first.reasons) == (
        second.prompt,
        second.tokens,
        second.texts,
        second.reasons,
    )


def accepted_per_step(result: Result) -> float:
    """Return the accepted draft tokens per verified tree."""
    accepted = result.metrics["vllm:spec_decode_num_accepted_tokens_total"]
    return accepted / result.metrics["vllm:spec_decode_num_drafts_total"]


def explain(found: list[tuple[Request, Output, Output]], most: int = 6) -> str:
    """Describe where outputs differ."""
    lines = [f"{len(found)} outputs differ:"]
    for request, output, plain in found[:most]:
        lines.append(f"- {request.params}, prompt of {len(output.prompt)} tokens")
        lines.append(f"  {difference(output, plain)}")
    return "\n".join(lines)


def difference(own: Output, wanted: Output, aborted: bool = False) -> str:
    """Describe how an output and its logprobs differ from those that are ``wanted``; empty if they
    do not. An ``aborted`` output is a beginning."""
    if own.prompt != wanted.prompt:
        return "other prompts"
    if not aborted and own.reasons != wanted.reasons:
        return f"reasons {own.reasons} != {wanted.reasons}; {_at(own, wanted)}"
    if not aborted and own.texts != wanted.texts:
        return f"texts {own.texts} != {wanted.texts}; {_at(own, wanted)}"
    for sequence, tokens in enumerate(own.tokens):
        expected = wanted.tokens[sequence]
        if tokens != (expected[: len(tokens)] if aborted else expected):
            return _at(own, wanted)
    return _logprobs(own, wanted, aborted)


def _at(own: Output, wanted: Output) -> str:
    """Describe the first token that differs."""
    for sequence, pair in enumerate(zip(own.tokens, wanted.tokens, strict=False)):
        for at, (token, expected) in enumerate(zip(*pair, strict=False)):
            if token != expected:
                scores = [
                    o.logprobs[sequence][at][:4] if o.logprobs[sequence] else None
                    for o in (own, wanted)
                ]
                return (
                    f"sequence {sequence}, token {at}: {pair[0][at:][:6]} != {pair[1][at:][:6]}"
                    f", logprobs {scores}"
                )
    return f"lengths {[*map(len, own.tokens)]} != {[*map(len, wanted.tokens)]}"


def _logprobs(own: Output, wanted: Output, aborted: bool) -> str:
    pairs = [
        (f"sequence {number}, token {at}", token, wanted.logprobs[number][at])
        for number, sequence in enumerate(own.logprobs)
        for at, token in enumerate(sequence)
    ]
    pairs.append(("prompt", own.prompt_logprobs, wanted.prompt_logprobs))
    for where, values, expected in pairs:
        near = len(values) == len(expected) and all(map(_near, values, expected))
        if not near and not (aborted and not values):
            return f"logprobs of {where}: {values} != {expected}"
    return ""


def _near(value: float, expected: float) -> bool:
    return value == expected or abs(value - expected) <= TOLERANCE
