"""Draw the losses of a training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Curve = Mapping[int, tuple[float | None, float]]
"""The losses by step: the mean since the step before, and that of held-out texts."""


def draw(curve: Curve, file: Path) -> None:
    """Write a picture of the losses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axis = figure.subplots()
    steps = sorted(curve)
    axis.plot(steps, [curve[step][1] for step in steps], label="held out")
    learned = [(step, value) for step in steps if (value := curve[step][0]) is not None]
    if learned:
        axis.plot(*zip(*learned, strict=True), ":", color="C0", label="learned")
    axis.set_xlabel("training steps")
    axis.set_ylabel("loss, nats per token")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.savefig(file, dpi=150)
