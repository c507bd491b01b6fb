"""Target and draft of one tokenizer, of which the target's embedding is padded.

`test_padded_drafts` has the trees that drafts of other sizes grow.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import workload
from comparison import accepted_per_step, by_request
from engine_process import Request, Run
from random_engines import Target
from random_targets import changed_copy
from safetensors.torch import load_file, save_file

from dyntree_plugin import pair

pytestmark = pytest.mark.e2e

TOKENS, PADDED = 1024, 1061
TEMPERATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "low": {"temperature": 0.7},
    "full": {},
}


def ask(number: int, name: str, **params: Any) -> Request:
    kind = "greedy" if name == "greedy" else "full"
    return workload.ask(number, kind, **TEMPERATURES[name], **params)


SAMPLE = Run(
    [ask(n, name) for n in range(14) for name in TEMPERATURES]
    + [request for request in workload.EVERYTHING[::9] if request.params.get("n", 1) == 1]
)
"""At temperature 0, 0.7 and 1, and with every parameter of a request."""
BEYOND = Run(
    [
        Request(prompt, {"max_tokens": 24, "temperature": t, "seed": n, "ignore_eos": True} | more)
        for n, prompt in enumerate(([5, 1030, 1060, 9], [1060], [7, *range(1024, 1061)]))
        for t in (0.0, 1.0)
        for more in ({}, {"allowed_token_ids": [*range(1000, PADDED)]})
    ]
)
"""Prompts and answers with tokens that a narrow draft lacks."""
RUNS = {"beyond": BEYOND, "sample": SAMPLE}
GREEDY = Run([ask(n, "greedy") for n in range(14)])


def padded(folder: Path) -> Path:
    """Write the embedded target with rows in its embedding that stand for no token, which a trained
    model hardly ever says; return its folder."""
    made = changed_copy(pair.paths()["target"], folder, vocab_size=PADDED)
    weights, name = load_file(made / "model.safetensors"), "model.embed_tokens.weight"
    rows = weights[name]
    generator = torch.Generator().manual_seed(PADDED)
    added = 0.02 * torch.randn(PADDED - len(rows), rows.shape[1], generator=generator)
    weights[name] = torch.cat([rows, added.to(rows.dtype)])
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return made


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    target = {"model": str(padded(tmp_path_factory.mktemp("padded") / "target"))}
    broken = {"wrong_child": replace(SAMPLE, sabotage="wrong_child")}
    return Target(
        {
            "plain": (workload.without_tree() | target, RUNS),
            "narrow draft": (workload.tree() | target, RUNS | broken),
            "drawn": (
                workload.tree(growth="dyspec", lookup="off") | target,
                {"greedy": GREEDY, "again": SAMPLE},
            ),
        }
    )


@pytest.mark.parametrize("run", RUNS)
def test_the_tokens_are_those_without_trees(run: str, target: Target) -> None:
    assert target.differing("narrow draft", run) == 0


def test_a_broken_walk_changes_tokens(target: Target) -> None:
    assert target.differing("narrow draft", "wrong_child")


def test_tokens_beyond_the_drafts_embedding_were_read(target: Target) -> None:
    outputs = target.served("plain")["beyond"].outputs
    beyond = [token for output in outputs for token in output.tokens[0] if token >= TOKENS]
    assert len(beyond) > 50
    assert accepted_per_step(target.served("narrow draft")["beyond"]) > 0


@pytest.mark.slow
def test_a_drawn_rule_gives_greedy_tokens_again_and_accepts(target: Target) -> None:
    results = target.served("drawn")
    assert target.differing("drawn", "greedy") == 0
    greedy, found = (
        by_request(run, results[name]) for name, run in (("greedy", GREEDY), ("again", SAMPLE))
    )
    assert all(found[key].tokens == output.tokens for key, output in greedy.items())
    assert results["again"].metrics["vllm:spec_decode_num_accepted_tokens_total"] > 100
