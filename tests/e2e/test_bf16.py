"""bf16: the target's scores of tree rows are those of a chain, within bf16's rounding."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

import pytest
import torch
import workload
from engine_process import Request, Result, Run, serve

pytestmark = pytest.mark.e2e

BF16 = {"dtype": "bfloat16"}
RUN = Run(workload.each_kind(range(24), max_tokens=48, logprobs=0), replay=True)
BROKEN = Run(RUN.requests, replay=True, sabotage="chain_positions")


@pytest.fixture(scope="module")
def trees() -> dict[str, Result]:
    return serve(workload.tree() | BF16, {"tree": RUN, "broken": BROKEN}, threads=1)


@pytest.fixture(scope="module")
def rounding(trees: dict[str, Result]) -> list[float]:
    """How far the chain in bf16 is from the same text read in fp32."""
    texts = [output.prompt + output.tokens[0] for output in trees["tree"].outputs]
    params = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
    run = Run([Request(text, params) for text in texts])
    exact = serve(workload.without_tree(), {"fp32": run}, threads=1)["fp32"]
    return [
        abs(in_bf16 - in_fp32)
        for output, read in zip(trees["tree"].outputs, exact.outputs, strict=True)
        for in_bf16, in_fp32 in zip(
            output.replayed, read.prompt_logprobs[len(output.prompt) - 1 :], strict=True
        )
    ]


def distances(result: Result) -> list[float]:
    """How far the tokens' logprobs are from those of the replay as a chain."""
    return [
        abs(scores[0] - replayed)
        for output in result.outputs
        for scores, replayed in zip(output.logprobs[0], output.replayed, strict=True)
    ]


def test_scores_on_the_tree_are_within_rounding_of_the_chain(
    trees: dict[str, Result], rounding: list[float], tell: Callable[[str], None]
) -> None:
    found, broken = distances(trees["tree"]), distances(trees["broken"])
    tell(
        f"bf16 logprobs, mean and largest distance: trees from the chain {_both(found)}, "
        f"the chain from fp32 {_both(rounding)}, with chain positions {_both(broken)}"
    )
    assert mean(found) <= mean(rounding)
    assert max(found) <= max(rounding)
    assert mean(broken) > 3 * mean(rounding)
    assert trees["tree"].metrics["vllm:dyntree_kv_moved_tokens_total"] > 0


def _both(values: list[float]) -> str:
    return f"{mean(values):.4f} and {max(values):.4f}"


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(),
    reason="this processor has no AMX: the other test ran on the 'vec' layout",
)
def test_amx_served_the_trees(trees: dict[str, Result]) -> None:
    assert trees["tree"].layout == "amx"
