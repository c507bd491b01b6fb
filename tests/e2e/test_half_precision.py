"""bf16 and fp16: the target's scores of tree rows are those of a chain, within rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import mean

import pytest
import torch
import workload
from engine_process import PARALLEL, Request, Result, Run, serve

pytestmark = pytest.mark.e2e

DTYPES = ("bfloat16", "float16")
RUN = Run(workload.each_kind(range(24), max_tokens=48, logprobs=0), replay=True)
BROKEN = Run(RUN.requests, replay=True, sabotage="chain_positions")


@dataclass(frozen=True)
class Served:
    """``trees``: the two runs in half precision. ``rounding``: how far the chain is from the same
    text read in fp32."""

    trees: dict[str, Result]
    rounding: list[float]

    @classmethod
    def with_dtype(cls, dtype: str) -> Served:
        runs = {"tree": RUN, "broken": BROKEN}
        trees = serve(workload.tree() | {"dtype": dtype}, runs, threads=1)
        outputs = trees["tree"].outputs
        params = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
        run = Run([Request(output.prompt + output.tokens[0], params) for output in outputs])
        exact = serve(workload.without_tree(), {"fp32": run}, threads=1)["fp32"]
        rounding = [
            abs(rounded - in_fp32)
            for output, read in zip(outputs, exact.outputs, strict=True)
            for rounded, in_fp32 in zip(
                output.replayed, read.prompt_logprobs[len(output.prompt) - 1 :], strict=True
            )
        ]
        return cls(trees, rounding)


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, Future[Served]]]:
    with ThreadPoolExecutor(PARALLEL) as pool:
        yield {dtype: pool.submit(Served.with_dtype, dtype) for dtype in DTYPES}


def distances(result: Result) -> list[float]:
    """How far the tokens' logprobs are from those of the replay as a chain."""
    return [
        abs(scores[0] - replayed)
        for output in result.outputs
        for scores, replayed in zip(output.logprobs[0], output.replayed, strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_on_the_tree_are_within_rounding_of_the_chain(
    started: dict[str, Future[Served]], dtype: str, tell: Callable[[str], None]
) -> None:
    served = started[dtype].result()
    trees, rounding = served.trees, served.rounding
    found, broken = distances(trees["tree"]), distances(trees["broken"])
    tell(
        f"{dtype} logprobs, mean and largest distance: trees from the chain {_both(found)}, "
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
def test_amx_served_the_trees(started: dict[str, Future[Served]]) -> None:
    assert started["bfloat16"].result().trees["tree"].layout == "amx"
