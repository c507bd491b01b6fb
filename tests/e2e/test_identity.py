"""Trees never change the output: tokens are equal to those of vLLM without trees, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import sabotage
import workload
from comparison import Outputs, by_request, difference, mismatches
from engine_process import Result
from slow import marked
from transformers import AutoTokenizer

pytestmark = pytest.mark.e2e

Served = Callable[[str], Mapping[str, Result]]
Differing = Callable[[str, str], str]

FALLBACKS = "vllm:dyntree_fallback_steps_total{reason="

HARMLESS = (
    "broken_draft",
    "guesses",
    "unranked",
    "unfollowed",
    *sabotage.OF_HEADS,
)
RUNS = [
    (engine, name)
    for engine, (_, runs) in workload.SAME_TOKENS.items()
    for name, run in runs.items()
    if run.sabotage in (None, *HARMLESS)
]


def fallbacks(metrics: Mapping[str, float]) -> set[str]:
    """Return the reasons for which steps of requests had no free tree."""
    found = {name for name, steps in metrics.items() if name.startswith(FALLBACKS) and steps}
    return {name.removeprefix(FALLBACKS).removesuffix("}") for name in found}


@pytest.mark.parametrize(("engine", "name"), marked(RUNS, workload.SLOW_ENGINES))
def test_the_tokens_are_those_without_trees(engine: str, name: str, differing: Differing) -> None:
    assert not (difference := differing(engine, name)), difference


@pytest.mark.parametrize(
    ("engine", "name"),
    marked(
        [
            *(("fixed", name) for name in sabotage.NAMES),
            *((engine, "wrong_child") for engine in workload.POOLS),
        ],
        workload.SLOW_ENGINES,
    ),
)
def test_a_broken_mechanism_changes_tokens(
    engine: str, name: str, served: Served, plain: Outputs
) -> None:
    found = mismatches(workload.SAME_TOKENS[engine][1][name], served(engine)[name], plain)
    assert any(output.tokens != without.tokens for _, output, without in found)


def test_a_draft_that_is_not_finite_costs_acceptance_alone(served: Served) -> None:
    """Control of the identity with a broken draft. Afterwards, learned values work as before.

    Look-up does not depend on the draft.
    """

    name = "vllm:spec_decode_num_accepted_tokens_total"
    broken, after = (
        served("tree")[run].metrics[name] for run in ("broken_draft", "after the broken draft")
    )
    assert 0 < broken < 0.9 * after


def test_a_target_that_is_not_finite_gives_what_it_gives_without_trees(
    served: Served, plain: Outputs
) -> None:
    run = workload.BROKEN_TARGET
    without = by_request(run, served("plain")["broken_target"])
    assert mismatches(run, served("tree")["broken_target"], without) == []
    # Control: a sound target gives other tokens.
    assert any(without[r.key].tokens != plain[r.key].tokens for r in run.requests)


@pytest.mark.parametrize("name", ["logprobs", "logprob_token_ids", "prompt_logprobs", "mixed"])
def test_logprobs_are_those_without_trees(name: str, served: Served, plain: Outputs) -> None:
    compared = 0
    for key, output in by_request(workload.TREE_RUNS[name], served("tree")[name]).items():
        assert not (found := difference(output, plain[key])), found
        compared += len(output.prompt_logprobs) + sum(map(len, output.logprobs))
    assert compared > 30


def test_a_repeated_prompt_is_served_from_the_prefix_cache(served: Served) -> None:
    results = served("tree")
    for cold, warm in zip(results["cold"].outputs, results["warm"].outputs, strict=True):
        assert cold.cached < 256 <= warm.cached


def test_a_conversation_reads_the_kv_that_trees_left_in_the_prefix_cache(served: Served) -> None:
    run = workload.TREE_RUNS["continued"]
    result = served("tree")["continued"]
    assert result.metrics["vllm:dyntree_kv_moved_tokens_total"] > 0
    from_output = 0
    for request, output in zip(run.requests, result.outputs, strict=True):
        answers = (request.turns - 1) * request.params["max_tokens"]
        from_output += output.cached > len(output.prompt) - answers
    assert from_output >= len(run.requests) // 2


def test_the_default_budget_verifies_less_than_was_grown(served: Served) -> None:
    """Control of the identity with this budget: trees have many sizes, and drafting ends early."""
    metrics = served("tree")["mixed"].metrics
    trees = metrics["vllm:dyntree_tree_nodes_count"]
    assert 0 < metrics["vllm:dyntree_tree_nodes_sum"] < 15 * trees
    assert metrics["vllm:dyntree_pruned_nodes_total{reason=budget}"] > 0
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0


@pytest.mark.parametrize(
    "engine", marked(["tight", "tight look-up", "tight head"], workload.SLOW_ENGINES)
)
def test_a_tiny_cache_preempts_requests(engine: str, served: Served) -> None:
    for name, result in served(engine).items():
        if "demanding" in name or name == "from people":
            assert result.metrics["vllm:num_preemptions_total"] > 0
            assert result.metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0


def test_prompts_longer_than_a_step_come_in_chunks(served: Served) -> None:
    step = workload.ENGINES["tight"][0]["max_num_batched_tokens"]
    for name in ("long prompts", "penalties of long prompts"):
        result = served("tight")[name]
        assert all(len(output.prompt) > step for output in result.outputs)
        assert result.metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0


@pytest.mark.parametrize(
    "engine", marked(["tree", "tight look-up", "tight head"], workload.SLOW_ENGINES)
)
def test_the_edges_of_the_context_are_reached(engine: str, served: Served) -> None:
    """That of the tight engines vLLM fits to their memory: the models' is 2,048 tokens."""
    for output in served(engine)["max_model_len"].outputs:
        assert len(output.prompt) + len(output.tokens[0]) == workload.MAX_MODEL_LEN
        assert output.reasons == ["length"]


def test_stop_strings_end_some_texts_early(served: Served) -> None:
    reasons = [output.reasons[0] for output in served("tree")["stop"].outputs]
    assert reasons.count("stop") >= len(reasons) // 2


def test_min_tokens_holds_back_an_end_that_comes_at_once_without_it(served: Served) -> None:
    for output in served("tree")["min_tokens"].outputs:
        assert len(output.tokens[0]) >= 12
        assert output.reasons == ["stop"]


def test_allowed_tokens_are_kept_to(served: Served) -> None:
    for output in served("tree")["allowed_token_ids"].outputs:
        assert set(output.tokens[0]) <= set(range(60, 400))


@pytest.mark.parametrize("name", ["several", "seeds beyond int64"])
def test_sequences_of_one_request_differ(name: str, served: Served) -> None:
    for output in served("tree")[name].outputs:
        assert len({tuple(tokens) for tokens in output.tokens}) == 3


def test_aborted_requests_end_and_the_others_finish(served: Served) -> None:
    run = workload.TREE_RUNS["aborted"]
    ended = [output is None for output in served("tree")["aborted"].outputs]
    assert ended == [number in run.abort_after for number in range(len(run.requests))]


def test_thoughts_end_when_their_budget_is_spent(served: Served) -> None:
    """Control: without a budget, some thoughts are longer."""
    encode = AutoTokenizer.from_pretrained(workload.without_tree()["model"]).encode
    (start,), (end,) = map(encode, workload.REASONING.values())

    def longest_thought(tokens: list[int]) -> int:
        longest, since = 0, None
        for at, token in enumerate(tokens):
            since = at if token == start else None if token == end else since
            longest = max(longest, 0 if since is None else at - since)
        return longest

    results = served("tree")
    budgeted, free = (
        [longest_thought(output.tokens[0]) for output in results[name].outputs]
        for name in ("thinking_budget", "greedy")
    )
    assert max(budgeted) == workload.THINKING_BUDGET < max(free)


@pytest.mark.parametrize("broken", sabotage.OF_PATHS)
@pytest.mark.parametrize("name", ["repetitive", "phrases", "thinking_budget"])
def test_without_the_paths_of_trees_parameters_would_change_tokens(
    name: str, broken: str, served: Served, plain: Outputs
) -> None:
    run = f"{name} {broken}"
    assert mismatches(workload.FIXED_RUNS[run], served("fixed")[run], plain)


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *(("tree", name) for name in ("penalties", "bad_words", "thinking_budget", "repetitive")),
        *(("tree", name) for name in ("greedy", "from people")),
        ("tight", "from people"),
    ],
)
def test_whatever_a_request_asks_for_leaves_trees_free(
    engine: str, name: str, served: Served
) -> None:
    metrics = served(engine)[name].metrics
    assert fallbacks(metrics) <= {"empty_tree"}
    assert metrics["vllm:dyntree_tree_depth_sum"] < metrics["vllm:dyntree_tree_nodes_sum"]
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0


def test_a_repetition_penalty_changes_tokens(served: Served, plain: Outputs) -> None:
    """Control of the identity with penalties, which would hold as well if none applied."""
    asked = workload.TREE_RUNS["repetitive"].requests
    penalized = [r for r in asked if "repetition_penalty" in r.params]
    greedy = [r for r in penalized if not r.params["temperature"]]
    without = {
        request.prompt: output.tokens[0]
        for request, output in zip(
            workload.TREE_RUNS["greedy"].requests, served("tree")["greedy"].outputs, strict=True
        )
    }
    changed = [r for r in greedy if plain[r.key].tokens[0] != without[r.prompt]]
    assert len(changed) > len(greedy) / 2 > 5
