"""Engines whose context vLLM fits to the memory after it has made the runner."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import fitted
import pytest
import workload
from slow import marked

from dyntree_plugin import pair

pytestmark = pytest.mark.e2e

SECOND = str(pair.paths()["second_draft"])
SOURCES: dict[str, tuple[dict[str, Any], int]] = {
    "draft": (workload.with_options(budget="fixed"), 3 << 20),
    "pool": (workload.with_options(budget="fixed", drafts=[SECOND]), 3 << 20),
    "head": (workload.with_head(pair.paths()["eagle3"], budget="fixed"), 3 << 20),
    "look-up": (workload.without_draft(method="ngram_gpu", budget="fixed"), 3 << 20),
}
"""Arguments of ``LLM``, and bytes of the KV cache that hold a context of 100 to 600 tokens."""


@pytest.fixture(scope="module")
def plain() -> Callable[[int], list[list[int]]]:
    """Return a function that gives the answers of an engine without trees, by its context."""

    @cache
    def run(context: int) -> list[list[int]]:
        tokens: list[list[int]] = fitted.answers(workload.without_tree(max_model_len=context))[
            "tokens"
        ]
        return tokens

    return run


@pytest.mark.parametrize("source", marked(SOURCES, {*SOURCES} - {"draft"}))
def test_prompts_that_end_shortly_before_a_fitted_context_get_the_same_answers(
    source: str, plain: Callable[[int], list[list[int]]]
) -> None:
    arguments, memory = SOURCES[source]
    found = fitted.answers({**arguments, "max_model_len": -1, "kv_cache_memory_bytes": memory})
    # It is shorter than that of the model, 2048.
    assert 100 < found["context"] < 600
    assert found["positions"] == 0
    assert found["accepted"] > 0
    assert [len(tokens) for tokens in found["tokens"]] == [*fitted.LEFT]
    assert found["tokens"] == plain(found["context"])
