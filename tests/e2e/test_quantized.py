"""Quantised weights: trees give the target's tokens, but for ties in bf16.

Each format is that of the usual tools; the engine without trees has the same quantised target.
Targets with recurrent layers have random weights, and quantised experts if they have any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import workload
from comparison import accepted_per_step
from engine_process import Result, Run
from quantized_models import FORMATS, quantize, quantized
from random_engines import NODES, Target
from random_engines import RUN as FEW
from random_targets import random_target
from recurrent_engines import broken_runs, sound_runs
from vision_targets import vision_target

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RUN = Run(workload.each_kind(range(36)))
NO_KERNEL = (
    "Failed to find a kernel",
    "MoE backend supports the deployment configuration",
    "'_C' object has no attribute",
    "_C::static_scaled_fp8_quant() expected at most 0",
)
"""What vLLM says if the processor or the build has no kernel for a form."""
LEFT_OUT = ("compressed fp8", "fp8 of blocks")
"""Of the first a CPU makes products in plain torch, which takes minutes for an engine. The pair's
widths are no multiples of the other's blocks."""


class Quantised(Target):
    def served(self, engine: str) -> Mapping[str, Result]:
        """Serve, or skip the test if vLLM has no kernel for these weights on this processor."""
        try:
            return super().served(engine)
        except RuntimeError as error:
            for reason in NO_KERNEL:
                if reason in str(error):
                    pytest.skip(f"vLLM runs no such weights here: {reason}")
            raise


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    @cache
    def of_form(form: str) -> Target:
        folder = tmp_path_factory.mktemp("quantized")
        models = {name: str(quantized(folder / name, name, form)) for name in ("target", "draft")}
        of: dict[str, Any] = {"model": models["target"], "dtype": "bfloat16"}
        trees = workload.tree() | of
        trees["speculative_config"] |= {"model": models["draft"]}
        runs = {"sound": RUN, "broken": replace(RUN, sabotage="wrong_child")}
        plain = workload.without_tree() | of | {"max_logprobs": -1}
        return Quantised(
            {"draft in bfloat16": (trees, runs), "plain in bfloat16": (plain, {"sound": RUN})}
        )

    return of_form


@pytest.mark.parametrize("form", [name for name in FORMATS if name not in LEFT_OUT])
def test_the_tokens_are_those_of_the_quantised_target_but_for_ties(
    form: str, target: Callable[[str], Target], tell: Callable[[str], None]
) -> None:
    """Control: after a broken walk, more of them differ."""
    own = target(form)
    found = own.in_half()
    tell(f"{form}: {found.as_json()}")
    assert found.unexcused == 0
    assert found.excused < found.requests / 2
    assert found.tokens > 600
    assert own.differing("draft in bfloat16", "broken", "plain in bfloat16") > found.excused
    assert accepted_per_step(own.served("draft in bfloat16")["sound"]) > 0.8


_HEADS = {"num_key_value_heads": 4}
_EXPERTS = {
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts_per_tok": 4,  # all of them, or rounding in bf16 would choose others
}
RECURRENT: dict[str, Callable[[Path], Path]] = {
    "nemotron_h": lambda folder: random_target(
        folder, "nemotron_h", ssm_state_size=64, mamba_num_heads=32, **_HEADS
    ),
    "qwen3_next": lambda folder: random_target(folder, "qwen3_next", **_HEADS, **_EXPERTS),
    "qwen3_5_moe": lambda folder: vision_target(folder, "qwen3_5_moe", **_HEADS, **_EXPERTS),
}
"""How to write a target whose layers have sizes that the kernels take."""


# Of Qwen3-Next in 4 bits, 2 and 3 of 30 answers differ by more than the margin of bf16: with AMX
# vLLM rounds the inputs of such layers to 8 bits.
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *((kind, "fp8 of blocks") for kind in RECURRENT),
        *((kind, form) for kind in ("nemotron_h", "qwen3_5_moe") for form in ("awq", "gptq")),
        ("nemotron_h", "compressed int8"),
    ],
)
def test_the_tokens_are_those_of_a_quantised_recurrent_target_but_for_ties(
    kind: str, form: str, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Controls: with a commit left out, or a wrong child, more of them differ."""
    model = quantize(RECURRENT[kind](tmp_path / "target"), form)
    of = {"model": str(model), "dtype": "bfloat16", "enable_prefix_caching": False}
    of |= {"language_model_only": True} if kind == "qwen3_5_moe" else {}
    broken = broken_runs(FEW, ["commit_dropped", "wrong_child"])
    plain = workload.without_tree() | of | {"max_logprobs": -1}
    own = Quantised(
        {
            "plain in bfloat16": (plain, sound_runs(FEW)),
            "draft in bfloat16": (workload.tree(NODES) | of, sound_runs(FEW) | broken),
        }
    )
    judged = own.in_half()
    found = {name: own.differing("draft in bfloat16", name, "plain in bfloat16") for name in broken}
    tell(f"{kind}, {form}: {judged.as_json()}, {found}")
    assert judged.unexcused == 0
    assert judged.excused < judged.requests / 2
    assert min(found.values()) > judged.excused
    assert accepted_per_step(own.served("draft in bfloat16")["sound"]) > 0.5
