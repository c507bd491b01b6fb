"""The CUDA engine, emulated on a CPU with graphs and kernels, gives the tokens of vLLM without
trees.

emulated/__init__.py says what is emulated, and what that cannot show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import workload
from comparison import Outputs, by_request, mismatches
from emulated.models import make_head, make_pair
from emulated_engine import Emulated, serve_emulated
from emulated_stages import serve_emulated_in_stages
from engine_process import Request, Result, Run, serve
from features import PHRASES
from slow import marked
from workload import ask, long

from dyntree_plugin import pair

pytestmark = pytest.mark.e2e

NODES, SEQUENCES = 8, 4
PROMPT_TOKENS = 16
LIMITS = {
    "max_model_len": 128,
    "max_num_seqs": SEQUENCES,
    "max_num_batched_tokens": 96,
    "num_gpu_blocks_override": 40,
}
"""Small sizes, because the interpreter takes milliseconds for each program of a launch."""
TREE = {"node_budget": NODES, "max_depth": 4, "width": 2, "children": 3}
OWN: dict[str, dict[str, Any]] = {
    # Three requests are padded to four. By default, vLLM has a graph for every small number of
    # requests.
    "fixed": {
        "compilation_config": {
            "mode": 0,
            "cudagraph_capture_sizes": [requests * (NODES + 1) for requests in (1, 2, 4)],
        }
    },
    # vLLM's own profiling is enough warm-up.
    "adaptive": {"compilation_config": {"mode": 0}, "kernel_config": {"enable_jit_warmup": False}},
}
OWN["head"] = OWN["chains"] = OWN["windows"] = OWN["block"] = OWN["cascade"] = OWN["fixed"]
OWN["drawn"] = OWN["adaptive"] | {"max_num_batched_tokens": 192}
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": NODES + 2,
}
"""Changes to the configuration of target and draft, for engines with windows."""
"""Arguments of the emulated engines: by budget, of the one with a head, and of those with chains
and trees that are drawn."""


def _short(*requests: Request) -> list[Request]:
    return [replace(request, keep=PROMPT_TOKENS) for request in requests]


MIXED = _short(
    ask(0, "greedy", max_tokens=9, ignore_eos=True),
    ask(1, "full", max_tokens=12, ignore_eos=True),
    ask(2, "full", max_tokens=7, ignore_eos=True, top_k=5, top_p=0.9),
    ask(3, "nucleus", max_tokens=11, ignore_eos=True),
    # These start when slots are free, while other requests decode.
    ask(4, "greedy", max_tokens=8, ignore_eos=True, repetition_penalty=1.3),
    ask(5, "full", max_tokens=8, structured_outputs={"regex": r"(ab|cd){2,9}[0-9]{2,5}!"}),
    ask(6, "greedy", max_tokens=10, ignore_eos=True, bad_words=PHRASES, thinking_token_budget=1),
)
"""Requests with short prompts, twice as many as there are slots."""
BROKEN = _short(*(ask(n, "full", max_tokens=6, ignore_eos=True) for n in range(10, 13)))
"""Three requests at a time; their graph is that of four."""
COPIES = [long(20, "full", 33, max_tokens=5, ignore_eos=True, seed=seed) for seed in range(3)]
"""Requests whose prompt is one token longer than a block of the cache. Once that block is cached,
vLLM fills them up with drafts, and a graph serves them."""
NOISY = _short(
    *(ask(n, "full", max_tokens=9, ignore_eos=True, temperature=1.5) for n in range(40, 46))
)
"""Requests of which the head guesses some tokens, since it knows the noise."""
DIFFERENT = _short(
    *(
        ask(n, "full", max_tokens=8, ignore_eos=True, extra_args={"dyntree_nodes": nodes})
        for n, nodes in zip(range(24, 28), (NODES, 5, 6, 0), strict=True)
    )
)
"""Four requests whose trees differ in size; the last one has none."""
CONTROLS = ("tree_moves", "placing_rests", "stale_masks", "padding_is_alive", "without_kv_move")
RUNS = {
    "mixed": Run(MIXED),
    "three": Run(BROKEN),
    "copies": Run(COPIES * 2, batch=3),
    **{name: Run(BROKEN, sabotage=name) for name in CONTROLS},
    "different": Run(DIFFERENT),
    "rows_of_another": Run(DIFFERENT, sabotage="rows_of_another"),
    # Tokens stay, so that it is not among those that change them.
    "one size": Run(DIFFERENT, sabotage="graphs_of_one_size"),
}
OF_CASCADE = {
    **{name: RUNS[name] for name in ("mixed", "three")},
    **{name: Run(BROKEN, sabotage=name) for name in ("lse_ignored", "trees_in_contexts")},
}
OF_HEAD = {"noisy": Run(NOISY, batch=3)}
CHAINS = {"drawn": Run([*BROKEN, *NOISY, *MIXED[:5]], batch=3)}
WINDOWED = {"windowed": Run([*MIXED[:4], *COPIES])}
BLOCKS = {"blocks": Run([*MIXED[:4], *BROKEN])}
"""Of the embedded target, whose block draft drafts. Some parameters change logits."""
EMULATED = {
    "fixed": RUNS,
    "adaptive": {"mixed": Run(MIXED[:5])},
    "head": OF_HEAD,
    "chains": CHAINS,
    "drawn": CHAINS,
    "windows": WINDOWED,
    "cascade": OF_CASCADE,
    "block": BLOCKS | {"states_lost": Run(BLOCKS["blocks"].requests, sabotage="states_lost")},
}
SLOW_ENGINES = {"adaptive", "head", "windows", "cascade", "block"}
DRAWN = ("chains", "drawn")
AS_DRAWN = {"worker_extension_cls": "laws_of_cuda.Extension"}
ON_CPU = {
    # On CUDA drafts follow no grammar.
    "fixed": {"mixed": Run(MIXED, sabotage="unfollowed")},
    "chains": CHAINS,
    "drawn": CHAINS,
    "block": BLOCKS,
    "head": OF_HEAD | {"without states": Run(NOISY, batch=3, sabotage="states_not_received")},
}


@dataclass(frozen=True)
class Served:
    """Outputs without trees; and the runs of an engine with trees, on a CPU and emulated."""

    plain: Callable[[str], Outputs]
    on_cpu: Callable[[str], Mapping[str, Result]]
    emulated: Callable[[str], Mapping[str, Emulated]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Served:
    pairs = {
        changed: make_pair(tmp_path_factory.mktemp("pair"), **(WINDOWS if changed else {}))
        for changed in (True, False)
    }
    head = make_head(tmp_path_factory.mktemp("headed"))
    every = Run([*MIXED, *BROKEN, *DIFFERENT, *COPIES, *NOISY])

    @cache
    def plain(target: str) -> Outputs:
        engine = {**workload.without_tree(model=target), **LIMITS}
        return by_request(every, serve(engine, {"every": every}, 1)["every"])

    def pair_of(name: str) -> tuple[str, str]:
        if name == "block":
            return str(pair.paths()["target"]), str(pair.paths()["dflash"])
        return pairs[name == "windows"]

    def trees(name: str) -> dict[str, Any]:
        target, draft = pair_of(name)
        if name == "block":
            return (
                workload.with_block(draft, length=7, budget="fixed", lookup="off", **TREE) | LIMITS
            )
        if name == "head":
            engine = workload.with_head(head, nodes=NODES, budget="fixed", **TREE)
            return {**engine, **LIMITS, "model": target}
        drawn, fixed = {"exactness": "distribution"}, {"budget": "fixed"}
        more = {"node_budget": 32, "width": 4}
        own = {"chains": fixed | drawn, "drawn": fixed | drawn | more, "windows": fixed}
        own["cascade"] = fixed | {"attention": "cascade"}
        options = TREE | own.get(name, {"budget": name})
        engine = workload.with_options(options["node_budget"], **options)
        speculation = {**engine["speculative_config"], "model": draft}
        return {**engine, **LIMITS, "model": target, "speculative_config": speculation}

    def as_on_cuda(name: str) -> dict[str, Any]:
        return {**trees(name), "enforce_eager": False, **OWN[name]}

    return Served(
        lambda name: plain(pair_of(name)[0]),
        cache(
            lambda name: serve(trees(name) | (AS_DRAWN if name in DRAWN else {}), ON_CPU[name], 1)
        ),
        cache(lambda name: serve_emulated(as_on_cuda(name), EMULATED[name])),
    )


def accepted(result: Result) -> float:
    return result.metrics["vllm:spec_decode_num_accepted_tokens_total"]


@pytest.mark.parametrize(
    ("budget", "name"),
    marked(
        [
            (budget, name)
            for budget, runs in EMULATED.items()
            for name, run in runs.items()
            if run.sabotage is None and budget not in DRAWN
        ],
        SLOW_ENGINES,
    ),
)
def test_the_tokens_are_those_without_trees(budget: str, name: str, runs: Served) -> None:
    result = runs.emulated(budget)[name].result
    found = mismatches(EMULATED[budget][name], result, runs.plain(budget))
    assert not [(request.params, mine.tokens, other.tokens) for request, mine, other in found]


@pytest.mark.parametrize(
    ("budget", "name"),
    marked(
        [
            (budget, name)
            for budget in ("fixed", "cascade")
            for name, run in EMULATED[budget].items()
            if run.sabotage is not None and name != "one size"
        ],
        SLOW_ENGINES,
    ),
)
def test_what_is_broken_changes_tokens(budget: str, name: str, runs: Served) -> None:
    run = EMULATED[budget][name]
    assert mismatches(run, runs.emulated(budget)[name].result, runs.plain(budget))


def test_whole_trees_are_accepted_as_on_the_cpu(runs: Served) -> None:
    found = runs.emulated("fixed")["mixed"].result
    assert accepted(found) == pytest.approx(accepted(runs.on_cpu("fixed")["mixed"]), rel=0.1)
    assert accepted(found) > sum(request.params["max_tokens"] for request in MIXED) / 3
    assert found.metrics["vllm:dyntree_kv_moved_tokens_total"] > 0


@pytest.mark.slow
def test_windows_change_the_tokens(runs: Served) -> None:
    result = runs.emulated("windows")["windowed"].result
    assert mismatches(WINDOWED["windowed"], result, runs.plain("fixed"))
    assert accepted(result) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn_gives_the_tokens_that_it_gives_on_the_cpu(name: str, runs: Served) -> None:
    emulated, on_cpu = runs.emulated(name)["drawn"], runs.on_cpu(name)["drawn"]
    # For a last token, vLLM's scheduler on the CPU has no draft verified; the emulated one, which
    # runs ahead, does not know that it is the last.
    tokens, wanted = (
        [[sequence[:-1] for sequence in output.tokens] for output in result.outputs]
        for result in (emulated.result, on_cpu)
    )
    assert tokens == wanted
    more = accepted(emulated.result) - accepted(on_cpu)
    assert 0 <= more <= len(CHAINS["drawn"].requests) < accepted(on_cpu)
    # Verification reads logits that have no address that lasts.
    assert emulated.replays["drafting"] > 0


@pytest.mark.slow
def test_a_heads_trees_are_accepted_as_on_the_cpu(runs: Served) -> None:
    found = accepted(runs.emulated("head")["noisy"].result)
    assert found == pytest.approx(accepted(runs.on_cpu("head")["noisy"]), rel=0.1)
    # Control: a head that does not read the target's states guesses less.
    assert accepted(runs.on_cpu("head")["without states"]) < 0.8 * found


@pytest.mark.slow
def test_a_block_drafts_trees_are_accepted_as_on_the_cpu(runs: Served) -> None:
    emulated = runs.emulated("block")
    found = accepted(emulated["blocks"].result)
    assert found == pytest.approx(accepted(runs.on_cpu("block")["blocks"]), rel=0.1)
    # Control: a draft that does not know the target's states guesses less.
    assert accepted(emulated["states_lost"].result) < 0.8 * found
    lost = emulated["states_lost"].result
    assert mismatches(BLOCKS["blocks"], lost, runs.plain("block")) == []


def test_structured_output_is_drafted_with_trees(runs: Served) -> None:
    metrics = runs.emulated("fixed")["mixed"].result.metrics
    assert metrics["vllm:dyntree_grammar_seconds_count"] > 0


@pytest.mark.slow
def test_an_adaptive_budget_verifies_trees(runs: Served) -> None:
    assert accepted(runs.emulated("adaptive")["mixed"].result) > 0


@pytest.mark.parametrize(
    ("budget", "name"),
    marked(
        [
            *(("fixed", "three"), ("adaptive", "mixed"), ("head", "noisy"), ("block", "blocks")),
            ("cascade", "three"),
        ],
        SLOW_ENGINES,
    ),
)
def test_the_steps_were_replayed(budget: str, name: str, runs: Served) -> None:
    emulated = runs.emulated(budget)[name]
    assert emulated.replays.keys() == {"target", "placing", "verification", "drafting"}
    assert min(emulated.replays.values()) >= len(emulated.result.seconds) / 3


@pytest.mark.parametrize("budget", marked(["fixed", "cascade"], SLOW_ENGINES))
def test_a_decode_step_launches_no_kernel_outside_of_graphs_and_replays_few(
    budget: str, runs: Served
) -> None:
    found = runs.emulated(budget)["three"]
    verified = found.replays["verification"] / 2  # the walk, and what is learned
    assert found.launches == {}
    assert found.replays["placing"] == verified
    # The catch-up, all forwards, and the finish. The prompts have no graph of a catch-up, and the
    # last step grows no tree.
    assert found.replays["drafting"] == 3 * verified


def test_trees_of_different_sizes_share_a_graph(runs: Served) -> None:
    found, alone = (runs.emulated("fixed")[name] for name in ("different", "one size"))
    assert found.launches == {}
    # Every step with a tree: the walk, and what is learned.
    assert found.replays["target"] == found.replays["verification"] / 2 > 1
    assert alone.launches["_tree_attention"] > 0
    assert alone.replays.get("target", 0) < found.replays["target"] / 2
    assert mismatches(EMULATED["fixed"]["one size"], alone.result, runs.plain("fixed")) == []


@pytest.mark.slow
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_a_pipeline_of_two_stages_gives_the_tokens_of_one_without_trees(
    eager: bool, tmp_path: Path
) -> None:
    target, draft = make_pair(tmp_path)
    engine = workload.with_options(NODES, budget="fixed", **TREE)
    speculation = {**engine["speculative_config"], "model": draft}
    engine = {**engine, **LIMITS, "model": target, "speculative_config": speculation}
    if not eager:
        engine = {**engine, "enforce_eager": False, **OWN["fixed"]}
    run = Run([*MIXED, *BROKEN])
    plain = serve({**workload.without_tree(model=target), **LIMITS}, {"": run}, 1)[""]
    found = serve_emulated_in_stages(engine, {"": run})[""]
    assert mismatches(run, found, by_request(run, plain)) == []
    assert accepted(found) > sum(request.params["max_tokens"] for request in run.requests) / 3
