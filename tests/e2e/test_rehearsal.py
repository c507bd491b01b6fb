"""No request waits for a kernel to be compiled, since engines rehearse what requests run."""

from __future__ import annotations

from typing import Any

import pytest
import workload
from engine_process import Run
from rehearsed_engine import compiled
from slow import marked

from dyntree_plugin import pair

pytestmark = pytest.mark.e2e

PARAMETERS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 0.8, "seed": 1},
    "truncated": {"temperature": 0.8, "seed": 2, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "penalties": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.1},
    "greedy penalties": {"presence_penalty": 0.2, "frequency_penalty": 0.1},
    "bias": {"logit_bias": {"5": 2.0}, "min_tokens": 3},
    "bad words": {"bad_words": ["the", "def x"]},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "logprobs of tokens": {"logprob_token_ids": [1, 2]},
    "grammar": {"structured_outputs": {"regex": "[a-c]{12}"}},
    "sampled grammar": {"temperature": 1.0, "seed": 4, "structured_outputs": {"regex": "[a-c]{9}"}},
    "thinking": {"thinking_token_budget": 4},
}
ALONE = {
    name: Run([workload.ask(0, "greedy", max_tokens=12, **given)])
    for name, given in PARAMETERS.items()
}
TOGETHER = [run.requests[0] for run in ALONE.values()]
RUNS = {
    "greedy": Run([workload.ask(0, "greedy", max_tokens=12)]),
    **ALONE,
    "a cached prefix": Run(workload.long_each_kind(range(2), 200) * 2, batch=1),
    "greedy, three at a time": Run([workload.ask(n, "greedy") for n in range(3)]),
    "together": Run(TOGETHER),
}
CHAIN = workload.with_options(3)["speculative_config"]
ENGINES = {
    "trees": workload.with_options(),
    "bfloat16": workload.with_options() | {"dtype": "bfloat16"},
    "look-up": workload.without_draft(),
    "head": workload.with_head(pair.paths()["eagle3"]),
    "drawn chains": workload.tree(8, exactness="distribution"),
    "one request": workload.tree() | {"max_num_seqs": 1},
    "without trees": workload.without_tree(),
    "vLLM's chain": workload.without_tree(speculative_config=CHAIN),
}


@pytest.mark.parametrize("engine", marked(ENGINES, {*ENGINES} - {"trees"}))
def test_no_request_waits_for_a_compilation(engine: str) -> None:
    for name, (rehearsed, late) in compiled(ENGINES[engine], RUNS).items():
        assert rehearsed, "Kernels were there before, so that none could be late."
        assert not late, name
