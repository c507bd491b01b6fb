"""Engines of targets with random weights, and whether their tokens differ with trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adapters import LORA, adapter_of, write_adapter
from comparison import by_request, mismatches
from device_identity import VOCABULARY, noise
from engine_process import Output, Request, Result, Run, serve
from features import PROMPTS, SEEDS, adapters_in_turn, long
from margins import Scores, Verdict, places, scores_of, scoring, verdict
from ranks import serve_on_ranks
from references import serve_right
from stages import serve_in_stages

from benchmarks.real.margins import MARGINS

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
QUANTISED_IN_FLOAT32 = {"distributed_executor_backend": "quantised_in_float32.Executor"}
"""What all engines take if the target has quantised weights in float32."""
LATENT_ON_CPU = {"attention_backend": "CPU_MLA"}
"""What they take if it has latent attention: with AMX vLLM chooses a backend for bfloat16 alone."""
ABORTED = Run(REQUESTS, abort_after={number: 2 + number % 5 for number in range(0, 30, 2)})
LONG = Run(
    [
        long(number, ("greedy", "full")[number % 2], 40 + number * 37 % 161, max_tokens=40, **FEW)
        for number in range(24)
    ]
)
LONG_ABORTED = Run(LONG.requests, abort_after={n: 2 + n % 5 for n in range(0, 24, 2)})
CONTINUED = Run(
    [
        replace(
            long(number, ("greedy", "full")[number % 2], 123 + number % 4, max_tokens=40, **FEW),
            turns=3,
        )
        for number in range(9)
    ],
    batch=3,
)
"""Conversations. Blocks of states have 32 or 64 tokens: a turn decodes past the end of one, which
the next turn finds in the prefix cache."""
TIGHT = {
    "max_model_len": 256,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 18,
}
"""Prompts come in chunks, and requests are preempted."""
NODES = 8
MIXED_UP = ("nodes_without_adapters", "adapters_of_others")
"""Names of sabotages that change the adapters of linear layers."""

Engines = Mapping[str, tuple[dict[str, Any], dict[str, Run]]]
"""Arguments and runs by name."""


def with_adapters(
    plain: dict[str, Any],
    draft: dict[str, Any],
    served: Run = LONG,
    modules: Sequence[str] = (),
    scale: float = 0.1,
) -> Engines:
    """Two adapters of all linear layers, and none, in one batch. ``modules``: the names of those
    layers, if they are not Llama's; ``scale``: what each then adds to a row of unit variance."""
    target = Path(plain["model"])
    folders = [target.with_name(f"{target.name} adapter {seed}") for seed in (1, 2)]
    written = [
        adapter_of(folder, seed, target, modules, scale)
        if modules
        else write_adapter(folder, seed, target)
        for seed, folder in enumerate(folders, start=1)
    ]
    run = Run(adapters_in_turn(served.requests, written))
    # vLLM has room for one change of adapter per request: 16.
    broken = {each: replace(run, sabotage=each, batch=7) for each in MIXED_UP}
    return {
        "plain with adapters": (plain | LORA, {"sound": run}),
        "adapters": (draft | LORA, {"sound": run} | broken),
    }


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
            elif engine.endswith("two stages"):
                self.results[engine] = serve_in_stages(arguments, runs)
            elif engine == "plain":
                quantised = "unquantised" in self.engines
                self.results[engine] = serve_right(arguments, runs, of_transformers=not quantised)
            else:
                own = self.variables.get(engine, {})
                self.results[engine] = serve(arguments, runs, threads=1, **own)
        return self.results[engine]

    def differing(self, engine: str, name: str, plain: str = "") -> int:
        """Count the requests of a run whose tokens are not those of the engine ``plain``."""
        return len(self.different(engine, name, plain))

    def different(self, engine: str, name: str, plain: str = "") -> list[Request]:
        """Return those requests."""
        plain = plain or ("plain with adapters" if engine == "adapters" else "plain")
        wanted: dict[str, Output] = {}
        for of_plain, run in self.engines[plain][1].items():
            wanted |= by_request(run, self.served(plain)[of_plain])
        run, result = self.engines[engine][1][name], self.served(engine)[name]
        return [request for request, *_ in mismatches(run, result, wanted)]

    def in_half(self, dtype: str = "bfloat16", margin: str = "", draft: str = "draft") -> Verdict:
        """Compare the engines "plain in DTYPE" and "DRAFT in DTYPE", with the margin of that type
        or of another one."""
        name = f"plain in {dtype}"
        plain, run = self.served(name)["sound"], self.engines[name][1]["sound"]
        found = places(run, self.served(f"{draft} in {dtype}")["sound"], by_request(run, plain))
        apart = [place for place in found if place is not None]
        scores: list[Scores] = []
        if apart:
            runs = {"scores": scoring(apart, VOCABULARY)}
            answers = serve(self.engines[name][0], runs, threads=1)["scores"].outputs
            scores = scores_of([answer for answer in answers if answer is not None])
        answers = [answer for answer in plain.outputs if answer is not None]
        return verdict(found, answers, scores, noise, MARGINS[margin or dtype])
