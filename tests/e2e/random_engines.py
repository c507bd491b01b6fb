"""Engines of targets with random weights, and whether their tokens differ with trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from comparison import by_request, mismatches
from device_identity import VOCABULARY, noise
from engine_process import Output, Request, Result, Run, serve
from features import PROMPTS, SEEDS
from margins import MARGINS, Scores, Verdict, places, scores_of, scoring, verdict
from ranks import serve_on_ranks
from stages import serve_in_stages

FEW = {"allowed_token_ids": [300, 301, 302]}
"""Random weights repeat nothing. Of so few tokens, look-up and a draft guess many."""


def _request(number: int, **params: Any) -> Request:
    """One of three temperatures; prompts of one token, of a few, and of several chunks."""
    temperature = (0, 0.7, 1)[number % 3]
    seed = {"seed": SEEDS[number]} if temperature else {}
    keep = (1, 9, 30, None)[number % 4]
    text = PROMPTS[number] * (1 + number % 2)
    return Request(text, {"temperature": temperature, "max_tokens": 40} | seed | params, keep=keep)


REQUESTS = [
    *(_request(number, **FEW) for number in range(24)),
    *(_request(number, stop=["e", "ti"]) for number in range(24, 30)),
]
RUN = Run(REQUESTS)
FLOAT32_DELTA_NET = {"worker_extension_cls": "float32_delta_net.Extension"}
"""What engines without trees take besides if the target has Gated DeltaNet in float32."""
ABORTED = Run(REQUESTS, abort_after={number: 2 + number % 5 for number in range(0, 30, 2)})
NODES = 8

Engines = Mapping[str, tuple[dict[str, Any], dict[str, Run]]]
"""Arguments and runs by name."""


@dataclass(frozen=True, eq=False)
class Target:
    """A target, and what its engines did: on two ranks or stages, if that is the engine's name.

    ``variables`` extend the environment of some engines.
    """

    engines: Engines
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    results: dict[str, Mapping[str, Result]] = field(default_factory=dict)

    def served(self, engine: str) -> Mapping[str, Result]:
        if engine not in self.results:
            arguments, runs = self.engines[engine]
            if engine == "two ranks":
                ranked = serve_on_ranks(arguments, runs)
                self.results[engine] = {name: each.result for name, each in ranked.items()}
            elif engine == "two stages":
                self.results[engine] = serve_in_stages(arguments, runs)
            else:
                own = self.variables.get(engine, {})
                self.results[engine] = serve(arguments, runs, threads=1, **own)
        return self.results[engine]

    def differing(self, engine: str, name: str, plain: str = "plain") -> int:
        """Count the requests of a run whose tokens are not those of the engine ``plain``."""
        wanted: dict[str, Output] = {}
        for of_plain, run in self.engines[plain][1].items():
            wanted |= by_request(run, self.served(plain)[of_plain])
        return len(mismatches(self.engines[engine][1][name], self.served(engine)[name], wanted))

    def in_bfloat16(self) -> Verdict:
        """Compare the engines "plain in bfloat16" and "draft in bfloat16"."""
        plain = self.served("plain in bfloat16")["sound"]
        run = self.engines["plain in bfloat16"][1]["sound"]
        found = places(run, self.served("draft in bfloat16")["sound"], by_request(run, plain))
        apart = [place for place in found if place is not None]
        scores: list[Scores] = []
        if apart:
            runs = {"scores": scoring(apart, VOCABULARY)}
            answers = serve(self.engines["plain in bfloat16"][0], runs, threads=1)["scores"].outputs
            scores = scores_of([answer for answer in answers if answer is not None])
        answers = [answer for answer in plain.outputs if answer is not None]
        return verdict(found, answers, scores, noise, MARGINS["bfloat16"])
