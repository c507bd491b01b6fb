"""Everything of vLLM that is replaced is documented."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import dyntree_kernels
import dyntree_plugin
import vllm_cpu_runner

PACKAGE = Path(dyntree_plugin.__file__).parent
KERNELS = Path(dyntree_kernels.__file__).parent
CPU_RUNNER = Path(vllm_cpu_runner.__file__).parent
SOURCES = sorted(
    [
        *PACKAGE.glob("*.py"),
        *PACKAGE.glob("engine/**/*.py"),
        *KERNELS.rglob("*.py"),
        *CPU_RUNNER.rglob("*.py"),
    ]
)

OURS = (
    "self.step.", "step.", "self._record.", "record.", "self._counts.", "counts.",
    "self.speculator.", "self.rejection_sampler.", "self.model_runner.", "copied.",
    "self._stages.", "self._draft.", "self.ops.", "self._sent[-1].", "each.masks", "made.",
    "LatentNumbaImpl.",
)  # fmt: skip
"""Prefixes of fields of our own objects."""
SETTINGS = (
    "speculative_config.num_speculative_tokens",
    "speculation.num_speculative_tokens_per_batch_size", "scheduler.scheduler_cls",
    "vllm_config.parallel_config.worker_cls", "attention.backend",
    "params.min_tokens", "params.max_tokens", "wrapped.seed",
    "short.allowed_token_ids", "short.logit_bias", "short._all_stop_token_ids",
    "structured.reasoning_ended", "sys.argv", "numba.config.THREADING_LAYER",
)  # fmt: skip
"""Fields that vLLM or a library expects to be set."""


def replaced(source: str) -> Iterator[str]:
    """Yield the fields of other objects that are assigned, and the private ones whose items are."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            parts = [t.elts if isinstance(t, ast.Tuple) else [t] for t in node.targets]
            for target in (target for targets in parts for target in targets):
                at = target.value if isinstance(target, ast.Subscript) else target
                if not isinstance(at, ast.Attribute) or ast.unparse(at.value) in ("self", "cls"):
                    continue
                if at is target or at.attr.startswith("_"):
                    yield ast.unparse(at)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "_replace":
            yield f"{ast.unparse(node.args[0])}.{ast.literal_eval(node.args[1])}"


def not_documented(source: str) -> list[str]:
    page = (PACKAGE.parent / "docs" / "vllm-patches.md").read_text()
    section = page.partition("## When the plugin loads")[2].partition("## What remains in")[0]
    others = (x for x in replaced(source) if not x.startswith(OURS) and x not in SETTINGS)
    known = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`", section))))
    return [x for x in others if x.rpartition(".")[2] not in known]


def test_what_is_replaced_is_documented() -> None:
    assert [(path.name, x) for path in SOURCES for x in not_documented(path.read_text())] == []


def test_a_replacement_that_is_not_documented_is_found() -> None:
    for line in (
        "model_state.prepare_outputs = ours",
        "stock, sampler.sample = sampler.sample, ours",
        "manager._graphs[3] = ours",
        "_replace(VllmConfig, 'compute_hash', hashing)",
    ):
        assert not_documented(line) != []
