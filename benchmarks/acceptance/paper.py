"""What the papers report, to stand beside what is measured here.

Source: DySpec (arXiv 2410.11744), Tables 1 to 4: accepted tokens per step of DySpec, Sequoia and
SpecInfer, temperature 0 and 0.6. Other models and texts: only ratios compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import geometric_mean


@dataclass(frozen=True)
class Reported:
    """Tokens per step by data set: (DySpec, Sequoia, SpecInfer)."""

    table: int
    pair: str
    budget: int
    temperature: float
    tokens: dict[str, tuple[float, float, float]]

    @property
    def over_sequoia(self) -> float:
        """DySpec's tokens per step over Sequoia's, geometric mean over data sets."""
        return geometric_mean(dyspec / sequoia for dyspec, sequoia, _ in self.tokens.values())

    @property
    def over_specinfer(self) -> float:
        return geometric_mean(dyspec / specinfer for dyspec, _, specinfer in self.tokens.values())


_SETS = ("C4", "OpenWebText", "CNN", "GSM8k", "MT-Bench")


def _reported(
    table: int, pair: str, budget: int, temperature: float, *rows: tuple[float, float, float]
) -> Reported:
    return Reported(table, pair, budget, temperature, dict(zip(_SETS, rows, strict=False)))


REPORTED = (
    _reported(
        1, "68M → 7B", 64, 0.0,
        (5.25, 4.99, 3.32), (3.79, 3.81, 2.54), (3.97, 4.04, 2.58), (6.86, 4.92, 3.47),
        (4.02, 3.55, 2.70),
    ),
    _reported(
        1, "68M → 7B", 64, 0.6,
        (3.71, 3.45, 3.44), (3.07, 3.04, 2.97), (3.18, 3.22, 3.06), (4.31, 3.55, 3.03),
        (3.62, 3.18, 2.71),
    ),
    _reported(
        2, "68M → 13B", 64, 0.0,
        (4.98, 4.35, 3.14), (3.59, 3.44, 2.44), (3.82, 3.67, 2.52), (5.29, 3.92, 2.98),
        (3.72, 3.46, 2.86),
    ),
    _reported(
        2, "68M → 13B", 64, 0.6,
        (3.62, 3.15, 3.15), (3.02, 2.80, 2.75), (3.11, 2.91, 2.84), (4.17, 3.39, 2.72),
        (3.62, 3.11, 2.84),
    ),
    _reported(
        3, "7B → 70B", 64, 0.0,
        (9.10, 6.08, 4.67), (7.23, 6.41, 4.88), (6.93, 6.42, 4.83), (12.39, 7.62, 5.34),
        (11.25, 7.46, 4.85),
    ),
    _reported(
        3, "7B → 70B", 64, 0.6,
        (6.21, 5.72, 5.75), (6.77, 6.07, 5.46), (6.95, 6.07, 5.75), (8.14, 6.89, 5.89),
        (10.11, 7.46, 5.67),
    ),
    _reported(
        4, "7B → 70B", 768, 0.0, (16.04, 9.40, 8.66), (11.79, 9.81, 7.36), (11.46, 9.54, 7.87)
    ),
    _reported(
        4, "7B → 70B", 768, 0.6, (7.14, 8.96, 6.93), (7.66, 9.12, 6.18), (7.02, 8.80, 6.24)
    ),
)  # fmt: skip
"""Of Table 4's DySpec at temperature 0.6, only the threshold variant was affordable."""
