"""Requests of `dyntree bench serve` with sampling parameters, and what is counted of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_lines import ran, ran_benchmark
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from dyntree_plugin import pair
from dyntree_plugin.commands.bench import summary, table
from dyntree_plugin.commands.bench.measure import warm_ups
from dyntree_plugin.commands.bench.results import Cell, Result, Series
from dyntree_plugin.commands.bench.session import Grid
from dyntree_plugin.commands.counters import Counters
from dyntree_plugin.commands.loads import counts, requests
from dyntree_plugin.commands.loads.engine import Served
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.requests import Request
from dyntree_plugin.commands.loads.runs import Engine, Fallbacks, Run, Speculation

GRAMMAR = {"structured_outputs": {"regex": "[ab]{3}"}}
PENALTY = {"repetition_penalty": 1.1}
TARGET = pair.paths()["target"]


@pytest.mark.parametrize("sampling", [GRAMMAR, PENALTY])
def test_parameters_that_an_engine_takes_are_admitted(sampling: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    verify = requests.engine_verifies({"model": str(TARGET), "no_such_argument": 1}, tokenizer)
    requests.check(sampling, "mine", 128, verify)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ('{"foo": 1}', """--sampling {"foo": 1}: 'foo' must be one of allowed_token_ids, bad_wo"""),
        ('{"temperature": 1}', "'temperature' must be one of"),
        ('{"min_p": 0.1}', "'min_p' must be one of"),
        ('{"repetition_penalty": 0}', "repetition_penalty must be greater than zero, got 0"),
        ('{"repetition_penalty": "1"}', "Expected `float`, got `str` - at `$.repetition_penalty`"),
        ('{"min_tokens": 200}', "min_tokens must be less than or equal to max_tokens=64"),
        ('{"stop_token_ids": [5000]}', "Vocabulary size: 1024"),
        ('{"structured_outputs": {"regx": "a"}}', "structured_outputs: 'regx' must be one of json"),
        ('{"structured_outputs": {"regex": "(a"}}', "--sampling {"),
        ('{"structured_outputs": {}}', "must use one kind of structured outputs"),
        ("3", "--sampling '3' must be a JSON object"),
    ],
)
def test_mistakes_in_parameters_are_named_before_an_engine_starts(
    sampling: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dyntree_plugin.commands.bench.session.Pool", None)
    ended = ran_benchmark("--sampling", sampling)
    assert ended.exit_code == 2, ended.output
    assert message in ended.stderr
    assert "Traceback" not in ended.output


def test_mistakes_in_a_file_and_options_of_one_name_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"prompt": "a", "sampling": {"top_p": 2}}))
    line = ["--prompts", str(path), "--batch", "1"]
    ended = ran("bench", "serve", *line)
    assert """the sampling {"top_p": 2} of 'mine': top_p must be in (0, 1]""" in ended.stderr
    twice = ["--sampling", '{"top_p": 0.5}'] * 2
    ended = ran_benchmark(*twice)
    assert "--sampling: two have the name 'top_p 0.5'" in ended.stderr


def test_every_set_is_served_with_each_sampling_and_the_requests_own_prevails() -> None:
    grid = Grid(["x"], [0.0], [1], 2, 8, 1, 0, [{}, PENALTY | {"top_k": 3}])
    loads = grid.loads({"x": [Request([1]), Request([2], {"top_k": 5})]})
    assert [cell.prompts for cell in loads] == ["x", "x, repetition_penalty 1.1, top_k 3"]
    first, second = ([request.sampling for request in load.requests] for load in loads.values())
    assert first == [{}, {"top_k": 5}]
    assert second == [PENALTY | {"top_k": 3}, PENALTY | {"top_k": 5}]


def test_answers_end_early_only_where_a_request_says_so() -> None:
    own: list[dict[str, Any]] = [{}, GRAMMAR, {"ignore_eos": False}, {"min_tokens": 64}]
    load = Load([Request([1], each) for each in own], 1, 0.0, 32)
    found = [load.sampling(number) for number in range(4)]
    assert [each["ignore_eos"] for each in found] == [True, False, False, True]
    # A load that warms up is shorter than what was checked.
    assert found[3]["min_tokens"] == 32
    assert "seed" not in found[0]
    assert Load([Request([1])] * 2, 1, 0.5, 32, seed=7).sampling(1)["seed"] == 8


def test_what_warms_up_has_a_request_of_every_kind() -> None:
    kinds: list[dict[str, Any]] = [{}, PENALTY, {}, PENALTY, GRAMMAR]
    mixed = Load([Request([n], each) for n, each in enumerate(kinds)], 2, 0.0, 99)
    plain = Load([Request([n]) for n in range(5)], 2, 0.0, 99)
    found = warm_ups([plain, mixed])
    assert [[request.prompt for request in load.requests] for load in found] == [
        [[0], [1]], [[0], [1], [4]],
    ]  # fmt: skip


class Scripted:
    """An engine whose steps give each request a number of tokens from a script, in ``seconds``."""

    now, seconds = 0.0, (0.0,) * 9

    def __init__(self, steps: Sequence[dict[str, int | None]]) -> None:
        self.steps, self.asked = list(steps), list[Any]()

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.asked.append(params)

    def step(self) -> list[Any]:
        """Give the tokens of the next step. A negative number of them ends the request."""
        Scripted.now += self.seconds[-len(self.steps)]
        return [
            SimpleNamespace(
                request_id=name,
                outputs=[
                    SimpleNamespace(
                        token_ids=[9] * abs(count or 0),
                        finish_reason="error" if count is None else None,
                    )
                ],
                finished=count is None or count < 0,
            )
            for name, count in self.steps.pop(0).items()
        ]


def served(*steps: dict[str, int | None]) -> tuple[Run, Scripted]:
    found = Served.__new__(Served)
    scripted = Scripted(steps)
    found._llm = SimpleNamespace(llm_engine=scripted)  # type: ignore[assignment]
    found._take_stages, found._begun = dict, 0
    run, _ = found.serve(Load([Request([1], GRAMMAR), Request([2])], 2, 0.0, 32))
    return run, scripted


def test_steps_and_tokens_of_requests_that_end_early_are_counted() -> None:
    # The first request waits for its grammar: a step without output, and one with the other's.
    run, scripted = served(
        {}, {"1": 1}, {"1": 3}, {"1": 2, "0": 1}, {"0": 2, "1": 3}, {"0": -1, "1": 4}, {"1": -2}
    )
    assert [params.ignore_eos for params in scripted.asked] == [False, True]
    assert run.output_tokens == 4 + 15
    assert run.request_steps == 2 + 5
    # After their first tokens, 3 in 2 steps and 14 in 5. At 17 / 7 tokens per step, the first has
    # 13 / 7 less than expected, and the second as many more.
    assert run.tokens_per_step_error == pytest.approx(2**0.5 * (13 / 7) / 7)
    # Of the steps in which no prompt is read, one has no output.
    assert run.steps == 4


@pytest.mark.parametrize(("slow", "seconds"), [(1, 4 / 7), (2, 202 / 7)])
def test_time_per_token_is_that_of_steps_that_read_no_prompt(
    slow: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So requests that end at different times make an engine no slower. Control: another step."""
    steps = {"0": 1}, {"0": 2, "1": 1}, {"0": 3, "1": 2}, {"0": -1, "1": -1}
    monkeypatch.setattr("time.perf_counter", lambda: Scripted.now)
    monkeypatch.setattr(Scripted, "seconds", [100.0 if n == slow else 1.0 for n in range(4)])
    assert served(*steps)[0].tpot_ms == pytest.approx(1e3 * seconds)


def test_a_request_that_an_engine_gives_up_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="vLLM has ended request 0 by an error"):
        served({"0": 1, "1": 1}, {"0": None, "1": 1})


def run_of(steps: int, tokens: int, **fallbacks: int) -> Run:
    return Run(
        round=0, requests=2, seconds=1.0, output_tokens=tokens, tpot_ms=1.0, ttft_ms=1.0,
        request_steps=steps, fallbacks=Fallbacks(request_steps=steps, by_reason=fallbacks),
        # vLLM counts what was accepted after the end, and no step without drafts.
        speculation=Speculation(drafts=5, draft_tokens=50, accepted_tokens=40),
    )  # fmt: skip


CELL = Cell(prompts="JSON by schema", temperature=0.0, batch=2)


def test_tokens_per_step_are_of_the_answers_and_of_all_steps() -> None:
    series = Series(engine="tree", cell=CELL, runs=[run_of(10, 42), run_of(30, 42)])
    assert summary.tokens_per_step(series) == 80 / 40


def test_the_table_says_in_how_many_steps_a_tree_was_a_chain_and_why() -> None:
    runs = [run_of(10, 42, penalties=1, empty_tree=2), run_of(30, 42, empty_tree=6)]
    result = Result(
        provenance={}, settings={}, notes=[],
        engines=[Engine(name=n, kind="dynamic tree", budget=8, arguments={}) for n in "ab"],
        series=[
            Series(engine="a", cell=CELL, runs=runs),
            Series(engine="b", cell=CELL, runs=[run_of(10, 42)]),
        ],
    )  # fmt: skip
    assert summary.fallback_shares(result.series[0]) == {"empty_tree": 0.2, "penalties": 0.025}
    assert [*table.remarks(result, CELL)] == [
        "a: chains or no tree in 22.5% of its requests' steps (empty_tree 20.0%, penalties 2.5%)."
    ]


@pytest.mark.parametrize("promise", [None, "distribution"])
def test_an_adaptive_budget_is_compared_with_the_best_fixed_one_of_its_promise(
    promise: str | None,
) -> None:
    options: dict[str, dict[str, Any]] = {
        "adaptive": {"exactness": promise} if promise else {},
        "fixed 4": {"budget": "fixed", "exactness": promise} if promise else {"budget": "fixed"},
        "fixed 8": {"budget": "fixed"},
        "fixed 32": {"budget": "fixed", "exactness": "distribution"},
    }
    times = {
        "adaptive": 3.0,
        "fixed 4": 6.0,
        "fixed 8": 1.5 if not promise else 0.1,
        "fixed 32": 9.0,
    }
    result = Result(
        provenance={}, settings={}, notes=[],
        engines=[
            Engine(
                name=name, kind="dynamic tree", budget=8,
                arguments={"additional_config": {"dyntree": given}},
            )
            for name, given in options.items()
        ],
        series=[
            Series(engine=name, cell=CELL, runs=[run_of(0, 2).model_copy(update={"tpot_ms": time})])
            for name, time in times.items()
        ],
    )  # fmt: skip
    ratio, best = ("2.00", "fixed 4") if promise else ("0.50", "fixed 8")
    assert [*table.remarks(result, CELL)] == [f"adaptive: {ratio} × the best fixed budget, {best}."]


def grown_of(page: str, before: tuple[int, ...], after: tuple[int, ...]) -> Counters:
    """Return how the counters of a page grow from these values to others."""
    pages = (text_string_to_metric_families(page % values) for values in (before, after))
    return counts.grown(*pages)


def test_steps_without_trees_are_read_from_the_metrics() -> None:
    page = """\
# TYPE vllm:dyntree_tree_nodes histogram
vllm:dyntree_tree_nodes_bucket{engine="0",le="+Inf"} %d
vllm:dyntree_tree_nodes_count{engine="0"} %d
vllm:dyntree_tree_nodes_sum{engine="0"} 99
# TYPE vllm:dyntree_fallback_steps_total counter
vllm:dyntree_fallback_steps_total{engine="0",reason="penalties"} %d
vllm:dyntree_fallback_steps_total{engine="1",reason="penalties"} 3
vllm:dyntree_fallback_steps_total{engine="0",reason="bad_words"} 4
"""
    grown = grown_of(page, (5, 5, 2), (25, 25, 9))
    assert counts.fallbacks(grown) == Fallbacks(request_steps=20, by_reason={"penalties": 7})
    assert counts.fallbacks(counts.grown([], [])) == Fallbacks()
