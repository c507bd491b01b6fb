"""vLLM's own chain of an EAGLE-3 head runs on the CPU: its tokens are those without speculation,
and its drafts are the head's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import heads
import pytest
import workload
from chain_engine import Chained, Drafts, serve_chain
from comparison import Outputs, by_request, explain, mismatches
from engine_process import Request, Run, serve
from safetensors.torch import load_file, save_file
from test_drawn_rules import least_p_value, tokens_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

K = 3
GREEDY = [workload.ask(number, "greedy", ignore_eos=True) for number in range(12)]
LAW = Run(
    [
        Request(r.prompt, {**r.params, "temperature": 1.5, "max_tokens": 4})
        for r in workload.LAW.requests[:400]
    ]
)


def greedy(requests: list[Request]) -> list[Request]:
    return [replace(each, params=each.params | {"temperature": 0.0}) for each in requests]


DEMANDING = greedy(workload.long_each_kind(range(100, 112), 60, max_tokens=60, ignore_eos=True))
"""Requests that together outgrow a small cache."""

LONG = greedy(workload.LONG_PROMPTS[:2])
FEATURES = [
    *workload.FEATURES["stop"],
    *workload.FEATURES["max_model_len"],
    *workload.FEATURES["structured_output"],
    *workload.FEATURES["penalties"],
]
OTHERS = [each for each in FEATURES if not each.params["temperature"]]
RUNS: dict[str, tuple[dict[str, str], dict[str, int], dict[str, Run]]] = {
    "mirror": (
        {"model": "mirror"},
        {},
        {
            "greedy": Run(GREEDY),
            "others": Run(OTHERS),
            "shifted": Run(GREEDY, sabotage="shifted_hidden_states"),
        },
    ),
    "random": (
        {"model": "random"},
        {"max_num_batched_tokens": 80, "num_gpu_blocks_override": 24},
        {
            "demanding": Run(DEMANDING),
            "long": Run(LONG, batch=1),
            "again": Run(LONG),
            "still": Run(GREEDY, sabotage="standing_still"),
        },
    ),
    "probabilistic": (
        {"model": "mirror", "draft_sample_method": "probabilistic"},
        {},
        {
            "greedy": Run(GREEDY),
            "law": LAW,
            "forgotten": replace(LAW, sabotage="forgotten_laws"),
        },
    ),
}
"""Speculation with the name of the head, further arguments, and runs of every engine."""

LAWS = ("law", "forgotten")
"""Runs whose tokens are drawn."""

IDENTICAL = [
    (engine, name) for engine, (_, _, runs) in RUNS.items() for name in runs if name not in LAWS
]


Served = Callable[[str], dict[str, Chained]]
"""Gives an engine's results by the names of its runs."""


def attentive_head(folder: Path) -> Path:
    """Write a random head whose tokens depend on where and to what its attention goes."""
    heads.random_head(folder)
    weights = load_file(folder / "model.safetensors")
    for name, factor in {"q_proj": 4.0, "k_proj": 4.0, "o_proj": 8.0}.items():
        weights[f"midlayer.self_attn.{name}.weight"] *= factor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {"random": attentive_head, "mirror": heads.mirror_head}
    return {name: str(make(tmp_path_factory.mktemp(name))) for name, make in made.items()}


@pytest.fixture(scope="module")
def results(folders: Mapping[str, str]) -> Served:
    """Return a function that gives an engine's results, and starts it when they are first asked
    for."""

    @functools.cache
    def served(name: str) -> dict[str, Chained]:
        own, further, runs = RUNS[name]
        speculation = {"method": "eagle3", "num_speculative_tokens": K}
        speculation |= own | {"model": folders[own["model"]]}
        engine = workload.without_tree(speculative_config=speculation, **further)
        return serve_chain(engine, runs)

    return served


@pytest.fixture(scope="module")
def plain() -> Outputs:
    """Outputs of every request but those of the law without speculation, by request key."""
    every = [run for _, _, runs in RUNS.values() for name, run in runs.items() if name not in LAWS]
    asked = [r for run in every for r in run.requests]
    run = Run(list({r.key: r for r in asked}.values()))
    return by_request(run, serve(workload.without_tree(), {"all": run}, threads=1)["all"])


@pytest.mark.parametrize(("engine", "name"), IDENTICAL)
def test_the_tokens_are_those_without_speculation(
    engine: str, name: str, results: Served, plain: Outputs
) -> None:
    run = RUNS[engine][2][name]
    found = mismatches(run, results(engine)[name].result, plain)
    assert not found, explain(found)


@pytest.mark.parametrize("engine", RUNS)
def test_no_request_waits_for_a_compilation(engine: str, results: Served) -> None:
    assert not [name for each in results(engine).values() for name in each.compiled]


def unlike_the_last_token(drafts: Drafts) -> float:
    """Return the share of drafts that are not the last token of their context."""
    wrong = [token != context[-1] for context, chain in drafts for token in chain]
    return sum(wrong) / len(wrong)


@pytest.mark.parametrize("engine", ["mirror", "probabilistic"])
def test_the_mirror_gets_the_hidden_state_of_the_last_token_but_one(
    engine: str, results: Served
) -> None:
    assert unlike_the_last_token(results(engine)["greedy"].drafts) == 0
    assert unlike_the_last_token(results("mirror")["shifted"].drafts) > 0.5


def wrong_drafts(folder: str, chained: Chained) -> tuple[int, int]:
    """Return the number of drafts that are not the head's, and of all, of some contexts."""
    head, wrong, total = heads.PlainHead(Path(folder)), 0, 0
    prompts = [output.prompt for output in chained.result.outputs if output is not None]
    drafts = [
        (context, chain)
        for context, chain in chained.drafts
        if any(context[: len(prompt)] == prompt for prompt in prompts)
    ]
    assert len(drafts) > 0.9 * chained.result.metrics["vllm:spec_decode_num_drafts_total"]
    for context, chain in drafts[:: max(1, len(drafts) // 16)]:
        for place, token in enumerate(chain):
            wrong += int(head.logits(context, chain[:place]).argmax()) != token
            total += 1
    return wrong, total


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["demanding", "long", "again"])
def test_drafts_are_those_of_the_head_over_the_whole_text(
    name: str, results: Served, folders: Mapping[str, str]
) -> None:
    wrong, total = wrong_drafts(folders["random"], results("random")[name])
    assert (wrong, total > 10) == (0, True)


@pytest.mark.usefixtures("one_thread")
def test_positions_that_stand_still_give_other_drafts(
    results: Served, folders: Mapping[str, str]
) -> None:
    wrong, total = wrong_drafts(folders["random"], results("random")["still"])
    assert wrong > 0.1 * total


def test_the_runs_preempt_requests_and_read_the_prefix_cache(results: Served) -> None:
    found = results("random")
    assert found["demanding"].result.metrics["vllm:num_preemptions_total"] > 0
    for output in found["again"].result.outputs:
        assert output is not None
        # The head's row of a position also holds the next token, so the last block is read again.
        assert output.cached == len(output.prompt) // 32 * 32 - 32


def test_probabilistic_drafts_keep_the_law(results: Served) -> None:
    found = results("probabilistic")
    law, forgotten = (found[name].result for name in LAWS)
    plain = serve(workload.without_tree(), {"law": LAW}, threads=1)["law"]
    without = tokens_of(plain)
    assert law.metrics["vllm:spec_decode_num_accepted_tokens_total"] > 100
    assert least_p_value(tokens_of(law), without) > 1e-3
    assert least_p_value(tokens_of(forgotten), without) < 1e-6


OTHER_HEADS = {
    "eagle": heads.first_eagle_mirror,
    # vLLM's chain on a CPU runs a single module.
    "mtp": partial(heads.mtp_mirror, modules=1),
}


@pytest.mark.parametrize("method", OTHER_HEADS)
def test_other_heads_draft_chains(method: str, tmp_path: Path, plain: Outputs) -> None:
    """The first kind of EAGLE, and a module within the target."""
    folder = str(OTHER_HEADS[method](tmp_path / "head"))
    speculation = {"method": method, "num_speculative_tokens": K}
    if method == "mtp":
        engine = workload.without_tree(model=folder, speculative_config=speculation)
    else:
        engine = workload.without_tree(speculative_config=speculation | {"model": folder})
    # vLLM takes another tokenizer for a target with a module.
    run = Run([replace(each, prompt=plain[each.key].prompt) for each in GREEDY])
    chained = serve_chain(engine, {"greedy": run})["greedy"]
    assert tokens_of(chained.result) == [plain[each.key].tokens[0] for each in GREEDY]
    assert unlike_the_last_token(chained.drafts) == 0
