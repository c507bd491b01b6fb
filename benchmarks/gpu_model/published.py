"""What others measured on GPUs, beside what the model says of the same steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import roofline
from benchmarks.gpu_model.model import Load, Pairing, Step, chain_step, none, point, tree_step
from benchmarks.laboratory import PLAIN, Drafted
from benchmarks.roofline import H100, H200, Shape

CONTEXT = 500
"""Tokens before a step. MT-bench has short prompts."""
WIDTH = 8
"""Nodes of a draft forward, as SGLang's ``speculative_eagle_topk`` was set for the 70B target."""

_QWEN = Shape("Qwen3-8B", 8.19e9, 36, 4096, 2 * 8 * 128, 151936)
_HEAD_70B = Shape("EAGLE-3 head of 70B", 1.4e9, 1, 8192, 2 * 8 * 128, 32000)

_VLLM = Pairing("8B, H100", roofline.LLAMA_8B, roofline.EAGLE_3_8B, H100, head=True)
_QWEN_H200 = Pairing("Qwen3-8B, H200", _QWEN, roofline.EAGLE_3_8B, H200, head=True)
_LARGE = Pairing("70B, 8 H100", roofline.LLAMA_70B, _HEAD_70B, H100, gpus=8, head=True)


@dataclass(frozen=True)
class Published:
    """One request's speed in an engine, as its source gives it."""

    engine: str
    source: str
    pairing: Pairing
    step: Drafted
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        return self.step.tokens / self.tokens_per_second

    @property
    def kind(self) -> str:
        if not self.step.nodes:
            return "none"
        return "chain" if self.step.nodes == self.step.forwards else "tree"


def _plain(engine: str, source: str, pairing: Pairing, speed: float) -> Published:
    return Published(engine, source, pairing, PLAIN, speed)


def _chain(length: int, tokens: float, milliseconds_per_token: float) -> Published:
    drafted = Drafted(length, tokens, length, length)
    return Published("vLLM", "vllm#20780", _VLLM, drafted, 1000 / milliseconds_per_token)


def _tree(source: str, pairing: Pairing, forwards: int, tokens: float, speed: float) -> Published:
    drafted = Drafted(64, tokens, forwards, 1 + (forwards - 1) * WIDTH)
    return Published("SGLang", source, pairing, drafted, speed)


PUBLISHED = (
    _plain("vLLM", "vllm#16937", _VLLM, 133),
    _plain("vLLM", "vllm#20780", _VLLM, 1000 / 7.07),
    _chain(2, 2.36, 4.32),
    _chain(4, 3.08, 4.05),
    _chain(7, 3.54, 4.29),
    _plain("SGLang", "SGLang's documentation", _VLLM, 158.34),
    _tree("sglang#4247", _VLLM, 5, 4.68, 361.70),
    _tree("sglang#4247", _VLLM, 8, 5.39, 378.57),
    _plain("SGLang", "EAGLE#211", _QWEN_H200, 186),
    _plain("SGLang", "sglang#4716", _LARGE, 88.61),
    _tree("sglang#4716", _LARGE, 8, 5.88, 234.54),
)
"""vllm#20780 names no GPU; its plain step is that of an H100. sglang#4247 does not say how many
nodes its trees have: 64 are assumed, as in sglang#4716."""


def modelled_seconds(each: Published) -> float:
    """Return the model's seconds of the same step: with dyntree's launches for a tree."""
    load = Load(1, 0.0, CONTEXT)
    steps = {
        "none": lambda: Step(PLAIN),
        "chain": lambda: chain_step(each.step),
        "tree": lambda: tree_step(each.step, WIDTH, each.pairing.head),
    }
    return point(each.pairing, steps[each.kind](), load).seconds


def rows() -> list[dict[str, Any]]:
    """Return every published step beside the model's."""
    found = []
    plain: dict[tuple[str, Pairing], float] = {}
    for each in PUBLISHED:
        if each.kind == "none":
            plain[each.engine, each.pairing] = each.tokens_per_second
        seconds = modelled_seconds(each)
        without = none(each.pairing, Load(1, 0.0, CONTEXT)).tokens_per_second
        found.append(
            {
                "engine": each.engine,
                "source": each.source,
                "setting": each.pairing.name,
                "kind": each.kind,
                "forwards": each.step.forwards,
                "tokens_per_step": each.step.tokens,
                "published_seconds": each.seconds,
                "modelled_seconds": seconds,
                "published_speed_up": each.tokens_per_second / plain[each.engine, each.pairing],
                "modelled_speed_up": each.step.tokens / seconds / without,
            }
        )
    return found
