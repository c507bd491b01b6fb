"""A model of offloaded weights, beside the factors that papers measured:
python -m benchmarks.offload_model

The target's weights lie in the CPU's memory and cross a link for every forward, layer by layer,
while the GPU computes the layer before. So a step takes the longer of two times, that of the link
and that of the GPU, and the time of drafting on top. Only the tokens per step are measured; no
engine runs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import laboratory, roofline
from benchmarks.laboratory import CHAIN, TREE, Drafted
from benchmarks.roofline import Gpu, Shape, forward_seconds
from dyntree_plugin.commands.vocabulary import shared
from dyntree_plugin.provenance import provenance

LINKS = {"PCIe 4": 25e9, "PCIe 5": 50e9}
"""Bytes per second of 16 lanes: four fifths of what is nominal. Assumed."""
CONTEXT = 256
"""Tokens before a step, as in the papers."""
TEMPERATURES = (0.0, 0.6, 1.0)


@dataclass(frozen=True)
class Setting:
    """A target in the CPU's memory and its draft on the GPU, with a link between the two.

    ``transfer`` replaces the seconds that the target's weights take on the link.
    """

    name: str
    target: Shape
    draft: Shape
    gpu: Gpu
    link: float
    transfer: float | None = None

    @property
    def transfer_seconds(self) -> float:
        return self.transfer or self.target.weight_bytes / self.link

    def target_seconds(self, rows: float) -> float:
        return max(
            self.transfer_seconds, forward_seconds(self.target, self.gpu, rows, cached=CONTEXT)
        )

    def drafting_seconds(self, step: Drafted) -> float:
        """Of the forward that reads the tokens of the last step, and of those over nodes."""
        if not step.forwards:
            return 0.0
        rows = step.expanded / step.forwards
        per_forward = forward_seconds(self.draft, self.gpu, rows, cached=CONTEXT)
        catch_up = forward_seconds(self.draft, self.gpu, step.tokens, cached=CONTEXT)
        return catch_up + (step.forwards - 1) * per_forward

    def speed_up(self, step: Drafted) -> float:
        """Tokens per second over those of a step without speculation."""
        seconds = self.target_seconds(1 + step.nodes) + self.drafting_seconds(step)
        return step.tokens * self.target_seconds(1) / seconds


SETTINGS = (
    *(
        Setting("8B", roofline.LLAMA_8B, roofline.LLAMA_1B, gpu, LINKS[link])
        for gpu, link in ((roofline.RTX_4090, "PCIe 4"), (roofline.RTX_5090, "PCIe 5"))
    ),
    *(
        Setting("70B", roofline.LLAMA_70B, roofline.LLAMA_8B, gpu, LINKS[link])
        for gpu, link in ((roofline.RTX_4090, "PCIe 4"), (roofline.RTX_5090, "PCIe 5"))
    ),
)


@dataclass(frozen=True)
class Published:
    """A factor that a paper measured, and the setting and the acceptance that it came with."""

    paper: str
    arxiv: str
    setting: Setting
    temperature: float
    step: Drafted
    factor: float


def _offloaded(name: str, target: Shape, draft: Shape, gpu: Gpu, transfer: float | None) -> Setting:
    return Setting(name, target, draft, gpu, LINKS["PCIe 4"], transfer)


_70B = (roofline.LLAMA_2_70B, roofline.LLAMA_2_7B)
_OPT = tuple(
    _offloaded(f"{shape.name}, A10", shape, roofline.OPT_125M, roofline.A10, None)
    for shape in (roofline.OPT_13B, roofline.OPT_30B)
)


def _dyspec(transfer: float) -> Setting:
    return _offloaded("Llama-2-70B, A100", *_70B, roofline.A100_40, transfer)


_SEQUOIA = _offloaded("Llama-2-70B, L40", *_70B, roofline.L40, 5.7)

PUBLISHED = (
    Published("SpecInfer", "2305.09781", _OPT[0], 0.0, Drafted(20, 3.07, 8, 20), 2.6),
    Published("SpecInfer", "2305.09781", _OPT[1], 0.0, Drafted(20, 3.91, 8, 20), 3.5),
    Published("Sequoia", "2402.12374", _SEQUOIA, 0.0, Drafted(768, 10.30, 18, 768), 8.6),
    Published("Sequoia", "2402.12374", _SEQUOIA, 0.6, Drafted(768, 9.91, 18, 768), 8.4),
    Published("DySpec", "2410.11744", _dyspec(5.6), 0.0, Drafted(64, 9.10, 10, 64), 9.42),
    Published("DySpec", "2410.11744", _dyspec(5.6), 0.6, Drafted(64, 6.21, 10, 64), 6.77),
    Published(
        "DySpec", "2410.11744", _dyspec(5.597), 0.0, Drafted(768, 16.04, 30, 768), 5.597 / 0.424
    ),
    Published(
        "DySpec", "2410.11744", _dyspec(5.348), 0.6, Drafted(551.8, 7.14, 30, 551.8), 5.348 / 0.885
    ),
)
"""SpecInfer gives 2.6 to 3.5 over its two targets, and 3.07 to 3.91 tokens per step over five sets
of prompts with a 7B target: the ends are put together. DySpec and Sequoia: on C4, where the paper
has several sets."""


def modelled() -> list[dict[str, Any]]:
    """Return the speed-up of every setting by temperature, method and nodes."""
    return [
        {
            "target": setting.name,
            "gpu": setting.gpu.name,
            "link": setting.link,
            "temperature": temperature,
            "method": method,
            **asdict(step),
            "target_seconds": setting.target_seconds(1 + step.nodes),
            "drafting_seconds": setting.drafting_seconds(step),
            "speed_up": setting.speed_up(step),
        }
        for setting in SETTINGS
        for temperature in TEMPERATURES
        for method in (TREE, CHAIN)
        for step in laboratory.measured(method, temperature)
    ]


def compared() -> list[dict[str, Any]]:
    """Return the papers' factors beside the model's, with their acceptance and with ours."""
    rows = []
    for each in PUBLISHED:
        ours = _nearest(each.temperature, each.step.nodes)
        rows.append(
            {
                "paper": each.paper,
                "arxiv": each.arxiv,
                "setting": each.setting.name,
                "transfer_seconds": each.setting.transfer_seconds,
                "temperature": each.temperature,
                "nodes": each.step.nodes,
                "tokens": each.step.tokens,
                "published": each.factor,
                "modelled": each.setting.speed_up(each.step),
                "laboratory_nodes": ours.nodes,
                "laboratory_tokens": ours.tokens,
                "laboratory_modelled": each.setting.speed_up(ours),
            }
        )
    return rows


def _nearest(temperature: float, nodes: float) -> Drafted:
    return min(laboratory.measured(TREE, temperature), key=lambda step: abs(step.nodes - nodes))


def model_table() -> str:
    """Return the model's speed-ups as a table for a page."""
    budgets = (16, 64, 256, 768)
    lines = [
        "| target | link | temperature | seconds of a plain step | chain of 16 | "
        + " | ".join(f"{n} nodes" for n in budgets)
        + " |",
        "|---|---|---:|---:|---:|" + "---:|" * len(budgets),
    ]
    for setting in SETTINGS:
        link = next(name for name, speed in LINKS.items() if speed == setting.link)
        for temperature in TEMPERATURES:
            steps = [_nearest(temperature, nodes) for nodes in budgets]
            chains = laboratory.measured(CHAIN, temperature)
            chain = min(chains, key=lambda step: abs(step.nodes - 16))
            factors = " | ".join(f"{setting.speed_up(step):.1f}" for step in (chain, *steps))
            plain = setting.target_seconds(1)
            lines.append(f"| {setting.name} | {link} | {temperature:g} | {plain:.2f} | {factors} |")
    return "\n".join(lines)


def paper_table() -> str:
    """Return the papers' factors beside the model's as a table for a page."""
    lines = [
        "| paper | setting | temperature | nodes | tokens per step | **published** | modelled | "
        "modelled with the laboratory's tokens |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['paper']} ({row['arxiv']}) | {row['setting']} | {row['temperature']:g} | "
        f"{row['nodes']:.0f} | {row['tokens']:.2f} | **{row['published']:.1f}** | "
        f"{row['modelled']:.1f} | {row['laboratory_modelled']:.1f} "
        f"({row['laboratory_tokens']:.2f} tokens, {row['laboratory_nodes']:.0f} nodes) |"
        for row in compared()
    ]
    return "\n".join(lines)


def draw() -> Figure:
    """Draw speed-up over nodes, a panel for each target, with the papers' factors."""
    mpl.use("agg")
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for name, panel in zip(("8B", "70B"), panels, strict=True):
        _curves(panel, next(s for s in SETTINGS if s.name == name and s.link == LINKS["PCIe 4"]))
    _points(panels[1])
    panels[0].set_ylabel("× tokens per second without speculation")
    figure.suptitle("Model, not measured: weights in CPU memory over PCIe 4, one request")
    return figure


def _curves(panel: Axes, setting: Setting) -> None:
    for colour, temperature in (("C0", 0.0), ("C1", 1.0)):
        trees = [s for s in laboratory.measured(TREE, temperature) if s.nodes >= 4]
        panel.plot(
            [s.nodes for s in trees],
            [setting.speed_up(s) for s in trees],
            "o-",
            color=colour,
            label=f"tree, temperature {temperature:g}",
        )
        chains = laboratory.measured(CHAIN, temperature)
        panel.axhline(
            max(map(setting.speed_up, chains)),
            color=colour,
            linestyle=":",
            label=f"best chain, temperature {temperature:g}",
        )
    panel.set_title(f"{setting.name}: a plain step takes {setting.target_seconds(1):.1f} s")
    panel.set_xscale("log", base=2)
    panel.set_xticks([4, 16, 64, 256, 768], ["4", "16", "64", "256", "768"])
    panel.set_xlabel("nodes per tree")
    panel.grid(alpha=0.3)
    panel.set_ylim(0, 15)
    panel.legend(fontsize="small", loc="upper left")


def _points(panel: Axes) -> None:
    """Add what DySpec and Sequoia measured at temperature 0, in its colour."""
    for each in (p for p in PUBLISHED if p.paper != "SpecInfer" and p.temperature == 0):
        panel.plot(
            each.step.nodes, each.factor, "*", color="C0", markeredgecolor="black", markersize=13
        )
        panel.annotate(
            f"{each.paper}, measured",
            (each.step.nodes, each.factor),
            textcoords="offset points",
            xytext=(-6, 6),
            ha="right",
            fontsize="small",
        )


def main(
    output: Annotated[Path | None, shared("--output", "A JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Where the picture goes.")] = None,
) -> None:
    """Model the speed-up of trees over a target whose weights lie in the CPU's memory."""
    print(f"{model_table()}\n\n{paper_table()}")  # noqa: T201
    if output is not None:
        result = {
            "kind": "model",
            "cells": modelled(),
            "papers": compared(),
            "provenance": provenance(),
        }
        output.write_text(json.dumps(result, indent=1) + "\n")
    if plot is not None:
        draw().savefig(plot, dpi=150)


if __name__ == "__main__":
    typer.run(main)
