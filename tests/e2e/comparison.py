"""Compare the outputs of two engines, and say how close two differing tokens were."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from engine_process import Output, Request, Result, Run, serve
from workload import without_tree

from dyntree_kernels.cpu.gumbel import gumbel_noise

Outputs = Mapping[str, Output]
"""Outputs by request key."""


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
    """Describe each difference: the first token that differs, and the margin between the two
    tokens."""
    shown = [difference for difference in found[:most] if _first_difference(*difference[1:])]
    margins = _margins(shown) if shown else {}
    lines = [f"{len(found)} outputs differ:"]
    for request, output, plain in found[:most]:
        at = _first_difference(output, plain)
        lines.append(f"- {request.params}, prompt of {len(output.prompt)} tokens")
        if at is None:
            lines.append(f"  {output.texts, output.reasons} != {plain.texts, plain.reasons}")
            continue
        sequence, index = at
        got, wanted = output.tokens[sequence], plain.tokens[sequence]
        lines.append(f"  token {index}: {got[index:][:6]} != {wanted[index:][:6]}")
        lines.append(f"  {margins[request.key]}")
    return "\n".join(lines)


def _first_difference(first: Output, second: Output) -> tuple[int, int] | None:
    """Return sequence and index of the first token that differs. None if there is no such token:
    all tokens are equal, or one output is longer."""
    for sequence, pair in enumerate(zip(first.tokens, second.tokens, strict=True)):
        for index, (a, b) in enumerate(zip(*pair, strict=False)):
            if a != b:
                return sequence, index
    return None


def _margins(differences: list[tuple[Request, Output, Output]]) -> dict[str, str]:
    """Return, by request key, the model's scores of both tokens, with the sampler's noise if it is
    known."""
    requests, places = [], []
    for request, output, plain in differences:
        place = _first_difference(output, plain)
        if place is None:
            continue
        sequence, index = place
        context = plain.prompt + plain.tokens[sequence][:index]
        both = plain.tokens[sequence][index], output.tokens[sequence][index]
        places.append((request, len(context) - 1, both))
        # Logprobs are computed before sampling is restricted.
        requests += [
            Request(context, {"allowed_token_ids": [token], "max_tokens": 1, "logprobs": 0})
            for token in both
        ]
    result = serve(without_tree(), {"scores": Run(requests)}, threads=1)["scores"]
    scores = [output.logprobs[0][0][0] for output in result.outputs if output is not None]
    found = {}
    for number, (request, position, both) in enumerate(places):
        own = scores[2 * number], scores[2 * number + 1]
        temperature = request.params.get("temperature", 1.0)
        if temperature and request.params.get("seed") is not None:
            seed = torch.tensor([request.params["seed"]])
            noise = gumbel_noise(seed, torch.tensor([position]), max(both) + 1)[0]
            own = tuple(x / temperature + float(noise[t]) for x, t in zip(own, both, strict=True))
        found[request.key] = (
            f"scores {own[0]:.7f} of the token without trees and {own[1]:.7f} of the other: "
            f"margin {own[0] - own[1]:.2e}"
        )
    return found
