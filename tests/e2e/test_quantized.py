"""Quantised weights: trees give the target's tokens, but for ties in bf16.

Each format is that of the usual tools; the engine without trees has the same quantised target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import workload
from comparison import accepted_per_step
from engine_process import Result, Run
from quantized_models import FORMATS, quantized
from random_engines import Target

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RUN = Run(workload.each_kind(range(36)))
NO_KERNEL = (
    "Failed to find a kernel",
    "'_C' object has no attribute",
    "_C::static_scaled_fp8_quant() expected at most 0",
)
"""What vLLM says if the processor or the build has no kernel for a form."""
TOO_SLOW = "compressed fp8"
"""A CPU makes these products in plain torch, which takes minutes for an engine."""


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


@pytest.mark.parametrize("form", [name for name in FORMATS if name != TOO_SLOW])
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
