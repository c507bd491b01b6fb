"""In bf16 and fp16, the target's scores of tree rows equal those of a chain within rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import emulated_amx
import engine_process
import pytest
import torch
import workload
from engine_process import Request, Result, Run, answered, result_of, serve

pytestmark = pytest.mark.e2e

DTYPES = ("bfloat16", pytest.param("float16", marks=pytest.mark.slow))
RUN = Run(workload.each_kind(range(24), max_tokens=48, logprobs=0), replay=True)
BROKEN = Run(RUN.requests, replay=True, sabotage="chain_positions")


@dataclass(frozen=True)
class Served:
    """The runs of one dtype.

    ``trees`` holds the two runs in half precision. ``in_fp32`` holds the logprobs of the first
    run's texts by request, computed in fp32.
    """

    trees: dict[str, Result]
    in_fp32: list[list[float]]

    @classmethod
    def with_dtype(cls, dtype: str) -> Served:
        runs = {"tree": RUN, "broken": BROKEN}
        program = engine_process if torch.cpu._is_amx_tile_supported() else emulated_amx
        answers = answered(str(program.__file__), workload.tree() | {"dtype": dtype}, runs, 1)
        trees = {name: result_of(answer) for name, answer in answers.items()}
        outputs = trees["tree"].outputs
        params = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
        run = Run([Request(output.prompt + output.tokens[0], params) for output in outputs])
        exact = serve(workload.without_tree(), {"fp32": run}, threads=1)["fp32"]
        read = [
            output.prompt_logprobs[len(asked.prompt) - 1 :]
            for asked, output in zip(outputs, exact.outputs, strict=True)
        ]
        return cls(trees, read)


@pytest.fixture(scope="module")
def served() -> Callable[[str], Served]:
    """Return the runs of a dtype; its engines start once."""
    return functools.cache(Served.with_dtype)


def distances(first: list[list[float]], second: list[list[float]]) -> list[float]:
    return [
        abs(a - b) for pair in zip(first, second, strict=True) for a, b in zip(*pair, strict=True)
    ]


def sampled(result: Result) -> list[list[float]]:
    """Return the logprobs of the emitted tokens by request."""
    return [[scores[0] for scores in output.logprobs[0]] for output in result.outputs]


def as_chain(result: Result) -> list[list[float]]:
    """Return the logprobs of the same tokens in the replay, by request."""
    return [output.replayed for output in result.outputs]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_on_the_tree_are_within_rounding_of_the_chain(
    served: Callable[[str], Served], dtype: str, tell: Callable[[str], None]
) -> None:
    """A chain rounds differently from a tree too, since its number of rows differs.

    The chain's distance from fp32 therefore says how much rounding is normal.
    """
    runs = served(dtype)
    tree, broken = runs.trees["tree"], runs.trees["broken"]
    found = distances(sampled(tree), runs.in_fp32)
    rounding = distances(as_chain(tree), runs.in_fp32)
    apart = distances(sampled(broken), as_chain(broken))
    tell(
        f"{dtype} logprobs, mean and largest distance from fp32: trees {_both(found)}, the chain "
        f"{_both(rounding)}; with chain positions from the chain {_both(apart)}"
    )
    assert mean(found) <= 1.5 * mean(rounding)
    assert max(found) <= 3 * max(rounding)
    assert mean(apart) > 3 * mean(rounding)
    assert tree.metrics["vllm:dyntree_kv_moved_tokens_total"] > 0


def _both(values: list[float]) -> str:
    return f"{mean(values):.4f} and {max(values):.4f}"


def test_bfloat16_was_packed_for_amx(served: Callable[[str], Served]) -> None:
    assert served("bfloat16").trees["tree"].layout == "amx"
