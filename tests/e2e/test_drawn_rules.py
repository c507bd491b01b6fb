"""Drawn trees and chains, one of them vLLM's own: samples have the target's law, greedy tokens are
equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import workload
from comparison import Outputs, mismatches
from engine_process import Result
from scipy.stats import chi2_contingency
from slow import marked

pytestmark = pytest.mark.e2e

Served = Callable[[str], Mapping[str, Result]]
ENGINES = marked(workload.DRAWN, workload.SLOW_ENGINES)
FREQUENT = 12  # prefixes counted one by one; the others are pooled


def tokens_of(result: Result) -> list[list[int]]:
    return [output.tokens[0] for output in result.outputs if output is not None]


def least_p_value(one: list[list[int]], other: list[list[int]]) -> float:
    """Return the least p-value of "tokens up to each place have the same law in both"."""
    values = []
    for place in range(1, len(one[0])):
        counts = [Counter(tuple(tokens[: place + 1]) for tokens in each) for each in (one, other)]
        known = [begin for begin, _ in (counts[0] + counts[1]).most_common(FREQUENT)]
        table = [[*(c[b] for b in known), c.total() - sum(c[b] for b in known)] for c in counts]
        values.append(chi2_contingency(table).pvalue)
    return min(values)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_tokens_have_the_law_of_decoding_without_trees(
    engine: str, served: Served, plain: Outputs
) -> None:
    result = served(engine)["law"]
    without = [plain[request.key].tokens[0] for request in workload.LAW.requests]
    assert result.metrics["vllm:spec_decode_num_accepted_tokens_total"] > 300
    assert least_p_value(tokens_of(result), without) > 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rule_that_accepts_too_much_is_told_by_the_law(
    engine: str, served: Served, plain: Outputs
) -> None:
    without = [plain[request.key].tokens[0] for request in workload.LAW.requests]
    assert least_p_value(tokens_of(served(engine)["always_accepted"]), without) < 1e-6


@pytest.mark.parametrize("engine", ENGINES)
def test_at_temperature_0_the_tokens_are_those_without_trees(
    engine: str, served: Served, plain: Outputs
) -> None:
    assert not mismatches(workload.GREEDY_SAMPLE, served(engine)["greedy"], plain)


def having(run: str) -> list[Any]:
    """Return the engines that have a run."""
    found = [name for name, (_, runs) in workload.DRAWN.items() if run in runs]
    return marked(found, workload.SLOW_ENGINES)


@pytest.mark.parametrize("engine", having("again"))
def test_a_seed_gives_the_same_tokens_again(engine: str, served: Served) -> None:
    first, again = (tokens_of(served(engine)[name]) for name in ("law", "again"))
    assert again == first[: len(again)]


@pytest.mark.parametrize("engine", having("everything"))
def test_what_a_request_may_ask_for_is_kept_to(engine: str, served: Served) -> None:
    run, result = workload.DRAWN_RUNS["everything"], served(engine)["everything"]
    for request, output in zip(run.requests, result.outputs, strict=True):
        assert output is not None
        if allowed := request.params.get("allowed_token_ids"):
            assert all(set(tokens) <= {*allowed, workload.END} for tokens in output.tokens)
        assert all(reason in ("stop", "length") for reason in output.reasons)
