"""LoRA adapters of the target: every row of a tree has its request's, and the draft has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import adapters
import features
import pytest
import workload
from comparison import Outputs, accepted_per_step, by_request, mismatches
from engine_process import Request, Result, Run, serve
from slow import marked
from workload import ask

from dyntree_plugin import pair

pytestmark = pytest.mark.e2e

SMALL = {"max_num_seqs": 7, "max_num_batched_tokens": 80, "num_gpu_blocks_override": 24}
BROKEN = [each.__name__ for each in adapters.BROKEN]

ASKED = [
    *workload.each_kind(range(12)),
    *(ask(number, "full", temperature=0.7) for number in range(12, 24)),
    *(each for each in workload.EVERYTHING[::3] if "prompt_logprobs" not in each.params),
]
LONG = workload.long_each_kind(range(140, 149), 300)
BREAKABLE = [*workload.each_kind(range(32), max_tokens=24)]
SAME = [ask(number, "full") for number in range(24)]

IDENTICAL = (
    *((engine, "sample") for engine in ("fixed", "adaptive", "head", "look-up")),
    *((engine, name) for engine in ("fixed", "head") for name in ("cold", "warm", "others'")),
    *(("fixed", name) for name in ("base", "layers", "output", "after the sabotage")),
    *(("tight", name) for name in ("demanding", "long prompts")),
    ("adaptive", "by fours"),
    *((engine, "from people") for engine in ("adaptive", "tight")),
)
SLOW_ENGINES = {"adaptive", "tight", "head", "look-up"}
FOLDERS = ("layers", "output")

Served = Callable[[str], Mapping[str, Result]]
Engines = Mapping[str, tuple[dict[str, Any], dict[str, Run]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return adapters.two_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def engines(folders: tuple[str, ...]) -> Engines:
    """Return arguments and runs of the engines with trees."""

    def mixed(requests: list[Request], **others: Any) -> Run:
        return Run(features.adapters_in_turn(requests, folders), **others)

    sample, cold, breakable = mixed(ASKED), mixed(LONG), mixed(BREAKABLE)
    long = {
        "cold": cold,
        "warm": cold,
        "others'": Run(features.adapters_in_turn(LONG, folders[::-1])),
    }
    every = zip(("base", *FOLDERS), (None, *folders), strict=True)
    tight = workload.tree(10, width=3, max_depth=4, children=3) | SMALL
    head = workload.with_head(pair.paths()["eagle3"], budget="fixed")
    return {
        "fixed": (
            workload.tree(),
            {
                "sample": sample,
                **long,
                **{name: Run([replace(r, adapter=a) for r in SAME]) for name, a in every},
                # vLLM has room for one change of adapter per request: 16.
                **{name: replace(breakable, sabotage=name, batch=7) for name in BROKEN},
                "after the sabotage": breakable,
            },
        ),
        "adaptive": (
            workload.with_options(),
            {"sample": sample, "by fours": Run(sample.requests[:24], batch=4),
             "from people": mixed(features.FROM_PEOPLE)},
        ),
        "head": (head, {"sample": sample, **long}),
        # The adapters take turns in one place for the weights of one.
        "look-up": (workload.without_draft(budget="fixed") | {"max_loras": 1}, {"sample": sample}),
        "tight": (tight, {"demanding": mixed(workload.DEMANDING, batch=7),
                          "long prompts": mixed(workload.LONG_PROMPTS),
                          "from people": mixed(features.FROM_PEOPLE, batch=7)}),
    }  # fmt: skip


@pytest.fixture(scope="module")
def every(request: pytest.FixtureRequest, engines: Engines) -> Run:
    """Return all requests of the engines that are asked for, once each."""
    asked = [getattr(item, "callspec", None) for item in request.session.items]
    named = {"fixed", *(spec.params.get("engine") for spec in asked if spec is not None)}
    runs = [run for name, (_, runs) in engines.items() if name in named for run in runs.values()]
    return Run([*{request.key: request for run in runs for request in run.requests}.values()])


@pytest.fixture(scope="module")
def served(engines: Engines, every: Run) -> Served:
    """Return a function that gives the results of an engine with trees, or of "plain"."""
    jobs = {"plain": (workload.without_tree(), {"all": every}), **engines}

    @cache
    def results(name: str) -> Mapping[str, Result]:
        arguments, runs = jobs[name]
        return serve(adapters.LORA | arguments, runs, threads=1)

    return results


@pytest.fixture(scope="module")
def plain(every: Run, served: Served) -> Outputs:
    """Outputs of all requests on the engine without trees, by request key."""
    return by_request(every, served("plain")["all"])


@pytest.mark.parametrize(("engine", "name"), marked(IDENTICAL, SLOW_ENGINES))
def test_the_tokens_are_those_without_trees(
    engine: str, name: str, engines: Engines, served: Served, plain: Outputs
) -> None:
    found = mismatches(engines[engine][1][name], served(engine)[name], plain)
    assert [(request.params, request.adapter) for request, *_ in found] == []


@pytest.mark.parametrize("name", BROKEN)
def test_rows_of_another_adapter_change_tokens(
    name: str, engines: Engines, served: Served, plain: Outputs
) -> None:
    assert mismatches(engines["fixed"][1][name], served("fixed")[name], plain)


@pytest.mark.parametrize("name", FOLDERS)
def test_an_adapter_changes_most_answers(name: str, served: Served) -> None:
    base, own = served("fixed")["base"].outputs, served("fixed")[name].outputs
    pairs = zip(base, own, strict=True)
    assert sum(a is not None and b is not None and a.tokens != b.tokens for a, b in pairs) > 20


@pytest.mark.parametrize("name", ["base", *FOLDERS])
def test_the_base_models_draft_serves_adapters(name: str, served: Served) -> None:
    result = served("fixed")[name]
    assert accepted_per_step(result) > 0.3
    fallbacks = [v for k, v in result.metrics.items() if "dyntree_fallback_steps" in k]
    # At most its last step has no tree: that of one token.
    assert sum(fallbacks) <= len(result.outputs)


@pytest.mark.parametrize("engine", marked(["fixed", "head"], SLOW_ENGINES))
def test_the_prefix_cache_keeps_adapters_apart(
    engine: str, engines: Engines, served: Served
) -> None:
    runs, results = engines[engine][1], served(engine)

    def cached(name: str) -> list[tuple[bool, int]]:
        pairs = zip(runs[name].requests, results[name].outputs, strict=True)
        return [(r.adapter is None, output.cached) for r, output in pairs if output is not None]

    assert all(tokens > 200 for _, tokens in cached("warm"))
    assert all((tokens > 200) == is_base for is_base, tokens in cached("others'"))


@pytest.mark.slow
def test_a_small_cache_preempts(served: Served) -> None:
    assert served("tight")["demanding"].metrics["vllm:num_preemptions_total"] > 0
