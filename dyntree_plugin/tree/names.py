"""The names of ways to grow, to get children and to verify. Imports nothing, for the options."""

from __future__ import annotations

from typing import Literal

GrowthName = Literal[
    "topk", "dyspec", "threshold", "dynamic_threshold", "expansion", "sequoia", "chain"
]

Sampling = Literal["best", "without_replacement", "with_replacement"]
"""How children come from the draft's distribution: its best tokens, or draws from it."""

Rule = Literal["match", "without_replacement", "multi_step"]
Budget = Literal["adaptive", "fixed"]
