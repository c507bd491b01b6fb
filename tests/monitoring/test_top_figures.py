"""The figures of `dyntree top`, and how they are shown, from made-up metrics pages."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from top_pages import page, text

from dyntree_plugin.commands.top.figures import figures
from dyntree_plugin.commands.top.page import Page, parse
from dyntree_plugin.commands.top.screen import fitted, screen
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


def test_one_engine_that_began_anew_leaves_the_others_as_they_are() -> None:
    before = Page(10.0, page(100).engines | page(10, engine="1").engines)
    now = Page(12.0, page(30).engines | page(15, engine="1").engines)
    assert [found.request_steps for found in figures(now, before)] == [30, 5]


def test_an_engine_that_did_nothing_has_no_figures_rather_than_wrong_ones() -> None:
    (found,) = figures(page(100, seconds=12.0), page(100, seconds=10.0))
    assert found.request_steps == 0
    assert found.acceptance_length is found.speed is found.fallback_share is None
    assert found.reached == []


def screen_of(body: str) -> str:
    """Return what is shown of a server whose page has this text."""
    console = Console(file=io.StringIO(), width=160)
    console.print(screen("a", figures(Page(0.0, parse(body).engines))))
    return str(console.file.getvalue())


class Counted(dict[str, str]):
    """The labels of a series, which count how often they are read."""

    reads = 0

    def __getitem__(self, name: str) -> str:
        Counted.reads += 1
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        Counted.reads += 1
        return super().__contains__(name)

    def items(self) -> Any:
        Counted.reads += 1
        return super().items()


def reads(series: int) -> int:
    """Return how often labels are read for figures of so many series of each name."""

    def counted(steps: int) -> Page:
        made = page(steps)
        found = made.engines["m", "0"]
        for name in list(found):
            own = [(Counted(labels | {"depth": str(n)}), 1.0) for n in range(series)
                   for labels, _ in found[name][:1]]  # fmt: skip
            found[name] = own
        return made

    before, now = counted(1), counted(2)
    Counted.reads = 0
    figures(now, before)
    return Counted.reads


def test_the_work_grows_no_faster_than_the_number_of_series() -> None:
    assert 0 < reads(400) <= 2 * reads(200)


def test_a_speed_that_is_not_known_is_shown_as_none() -> None:
    body = "".join(each for each in text(100).splitlines(True) if "compared" not in each)
    zero = f'{PREFIX}compared_seconds_total{{model_name="m",engine="0",decoding="tree"}} 0\n'
    for more in ("", zero):
        (found,) = figures(Page(0.0, parse(body + more).engines))
        assert found.speed is None
        (shown,) = re.findall(r"speed against none\s+(\S+)", screen_of(body + more))
        assert shown == "–"


def test_the_sources_of_tokens_are_shown_if_there_are_several() -> None:
    several = screen_of(text(100))
    assert re.search(r"accepted from.*draft +67%.*look_up +33%", several, re.DOTALL)
    one = "".join(each for each in text(100).splitlines(True) if 'source="look_up"' not in each)
    assert "accepted from" not in screen_of(one)


def test_every_engine_has_its_own_figures() -> None:
    both = Page(0.0, page(100).engines | page(10, engine="1").engines)
    assert [(f.engine, f.request_steps) for f in figures(both)] == [("0", 100), ("1", 10)]


def test_engines_are_in_the_order_of_their_numbers() -> None:
    engines = [page(10, engine=str(number)).engines for number in (10, 2, 0)]
    all_of_them = Page(0.0, engines[0] | engines[1] | engines[2])
    assert [found.engine for found in figures(all_of_them)] == ["0", "2", "10"]


@pytest.mark.parametrize(("height", "whole"), [(12, False), (200, True)])
def test_a_small_terminal_says_how_many_lines_it_has_no_room_for(height: int, whole: bool) -> None:
    console = Console(file=io.StringIO(), width=100, height=height)
    shown = screen("a", figures(Page(0.0, page(100).engines)))
    lines = len(console.render_lines(shown, pad=False))
    console.print(fitted(console, shown))
    printed = str(console.file.getvalue()).rstrip("\n").splitlines()
    assert len(printed) == min(lines, height)
    assert ("more lines" in printed[-1]) == (not whole)
    if not whole:
        assert f"… {lines - height + 1} more lines" in printed[-1]


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


def test_no_series_counts_twice() -> None:
    twice = Page(0.0, parse(text(100) * 2).engines)
    assert figures(twice) == figures(Page(0.0, page(100).engines))


def test_a_series_without_its_label_or_without_a_number_counts_nowhere() -> None:
    odd = f'{PREFIX}fallback_steps_total{{model_name="m",engine="0"}} 5\n'
    odd += f'{PREFIX}fallback_steps_total{{model_name="m",engine="0",reason="x"}} NaN\n'
    assert figures(Page(0.0, parse(text(100) + odd).engines)) == figures(page(100))


def test_engines_may_come_and_go_between_two_looks() -> None:
    one, two = page(100), Page(2.0, page(150).engines | page(10, engine="1").engines)
    for before, now in ((one, two), (two, one)):
        console = Console(file=io.StringIO(), width=160)
        console.print(screen("a", figures(two), figures(now, before)))
        assert "engine 1" in console.file.getvalue()
