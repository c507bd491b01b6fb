"""The figures of `dyntree top`, and how they are shown, from made-up metrics pages."""

from __future__ import annotations

import io
import json
from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from top_pages import page

from dyntree_plugin.commands.top.figures import figures
from dyntree_plugin.commands.top.page import Page, parse
from dyntree_plugin.commands.top.screen import screen
from dyntree_plugin.metrics.names import METRICS, PREFIX


def test_the_figures_are_ratios_of_the_counters() -> None:
    (found,) = figures(page(100))
    assert found.acceptance_length == 4
    assert found.node_efficiency == 0.25
    assert found.speed == pytest.approx(2)
    assert found.calibration == 1.5
    assert found.tokens_per_step == 8
    assert found.fallbacks == pytest.approx({"logits_processors": 0.1, "empty_tree": 0.5})
    assert found.fallback_share == pytest.approx(0.1), "an empty tree may be a choice"
    assert found.reached == [2, 1]
    assert found.sources == {"draft": pytest.approx(2 / 3), "look_up": pytest.approx(1 / 3)}
    assert found.stage_seconds == {"target": pytest.approx(0.04)}
    assert found.tokens_per_second is None


def test_between_two_pages_only_what_happened_between_them_counts() -> None:
    (found,) = figures(page(150, seconds=12.0), page(100, seconds=10.0))
    assert found.request_steps == 50
    assert found.tokens_per_second == 100
    assert found.acceptance_length == 4


def test_an_engine_that_began_anew_has_counted_from_nothing_since() -> None:
    (found,) = figures(page(30, seconds=12.0), page(100, seconds=10.0))
    assert found.request_steps == 30
    assert found.tokens_per_second == 60
    assert found.acceptance_length == 4


def test_an_engine_that_did_nothing_has_no_figures_rather_than_wrong_ones() -> None:
    (found,) = figures(page(100, seconds=12.0), page(100, seconds=10.0))
    assert found.request_steps == 0
    assert found.acceptance_length is found.speed is found.fallback_share is None
    assert found.reached == []


ODD = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["\x1b]0;x\x07", "\u202egro", "[bold red]x[/]", "[/]", "\r\n", "\x9b2J", "{}"]),
)
NUMBERS = ["NaN", "+Inf", "-Inf", "1e308", "-1e308", "5e-324", "-3", "0", "7", "1e18", "0.1"]


def quoted(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def line(name: str, value: str, labels: dict[str, str]) -> str:
    told = ",".join(f'{label}="{quoted(text)}"' for label, text in labels.items())
    return f"{name}{{{told}}} {value}\n"


@st.composite
def pages(draw: st.DrawFn, model: str) -> Page:
    """Draw pages whose series have any labels and values, and occur twice, once or never."""
    names = [series for metric in METRICS for series in metric.series]
    labels = {"reason": ODD, "stage": ODD, "depth": ODD, "decoding": ODD}
    lines = [line(f"{PREFIX}config_info", "1", {"model_name": model, "x": draw(ODD)})]
    for name in draw(st.lists(st.sampled_from([*names, "vllm:num_requests_running"]), max_size=30)):
        own = draw(st.fixed_dictionaries({"model_name": st.just(model)}, optional=labels))
        lines += [line(name, draw(st.sampled_from(NUMBERS)), own)] * draw(st.integers(1, 2))
    return parse("".join(lines))


@settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
@given(st.data(), ODD)
def test_whatever_a_page_says_is_shown_as_text_and_told_in_numbers(
    data: st.DataObject, model: str
) -> None:
    before, now = data.draw(pages(model)), data.draw(pages(model))
    total, lately = figures(now), figures(now, before)
    json.dumps([asdict(one) for one in (*total, *lately)], allow_nan=False)
    console = Console(file=io.StringIO(), width=160)
    console.print(screen(model, total))
    console.print(screen(model, total, lately))
    shown = console.file.getvalue()
    assert shown.replace("\n", "").isprintable()
    assert ("[bold red]x[/]" in shown) >= (model == "[bold red]x[/]")
