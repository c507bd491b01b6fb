"""`dyntree show` on a real engine, and its page in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from dyntree_plugin.commands.render import meaning
from dyntree_plugin.commands.show.generation import Generation, load
from dyntree_plugin.commands.show.page import render
from dyntree_plugin.tree.step import SOURCES, Source

pytestmark = pytest.mark.e2e

NODES = 64
TOKENS = 48
COMMAND = [sys.executable, "-m", "dyntree_plugin.cli", "show"]

CHROMIUM = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trace and a page of large trees, made by the command."""
    made: Path = tmp_path_factory.mktemp("show")
    line = [f"--nodes={NODES}", f"--max-tokens={TOKENS}", "--temperature=0.9", "--seed=3"]
    line += ['--dyntree={"children": 6}', "--trace", str(made / "trace.json")]
    done = subprocess.run(
        [*COMMAND, *line, "--output", str(made / "page.html")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout
    return made


@pytest.fixture(scope="module")
def generation(folder: Path) -> Generation:
    return load(folder / "trace.json")


def test_the_trace_is_that_of_the_completion(generation: Generation) -> None:
    assert len(generation.tokens) == TOKENS
    # The prompt's forward gives the first token. `Generation` checks the rest.
    emitted = [token for step in generation.steps for token in step.emitted]
    assert emitted[: TOKENS - 1] == generation.tokens[1:]
    assert generation.node_budget == NODES
    assert max(len(step.tokens) for step in generation.steps) == NODES


def test_a_saved_trace_is_drawn_without_vllm(folder: Path, generation: Generation) -> None:
    code = (
        "import sys\nfrom dyntree_plugin.cli import app\n"
        "try: app(sys.argv[1:])\nexcept SystemExit as end: assert not end.code\n"
        "sys.exit('vllm' in sys.modules)"
    )
    line = ["show", "--from", str(folder / "trace.json"), "--format", "terminal"]
    done = subprocess.run(
        [sys.executable, "-c", code, *line], capture_output=True, text=True, check=True
    )
    titles = re.findall(r"Step (\d+) of \d+: (\d+) nodes", done.stdout)
    assert titles == [(str(n), str(len(s.tokens))) for n, s in enumerate(generation.steps, 1)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        pytest.skip("no Chromium is installed; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, folder: Path) -> Iterator[Page]:
    """Yield the page. It must not print to the console, and must request nothing but itself."""
    complaints: list[str] = []
    asked: list[str] = []
    with browser.new_context(viewport={"width": 1440, "height": 900}) as context:
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        address = (folder / "page.html").as_uri()
        page.goto(address)
        yield page
        assert not complaints
        assert set(asked) == {address}


def tokens(page: Page, selector: str) -> list[int]:
    """Return the tokens of the nodes that are drawn this way, in the trace's order."""
    nodes = page.locator(f"#tree .node{selector}")
    return nodes.evaluate_all("nodes => nodes.map(node => Number(node.dataset.token))")


def show_with_slider(page: Page, step: int) -> None:
    page.locator("#slider").fill(str(step))


def test_every_step_is_drawn_as_it_is_in_the_trace(page: Page, generation: Generation) -> None:
    for number, step in enumerate(generation.steps, start=1):
        show_with_slider(page, number)
        assert page.locator("#step-number").inner_text() == str(number)
        assert tokens(page, ".candidate") == step.tokens
        assert tokens(page, ".accepted") == [step.tokens[node] for node in step.accepted]
        assert tokens(page, ".bonus") == [step.bonus_token]
        assert tokens(page, ".root") == [step.root_token]
        assert page.locator("#tree .edge").count() == len(step.tokens) + 1
        assert page.locator("#tree .edge.accepted").count() == len(step.accepted)
        assert page.locator("#node-count").inner_text() == str(len(step.tokens))
        assert page.locator("#accepted-count").inner_text() == str(len(step.accepted))


def test_the_accepted_path_is_another_colour(page: Page, generation: Generation) -> None:
    most = max(generation.steps, key=lambda step: len(step.accepted))
    assert most.accepted
    show_with_slider(page, generation.steps.index(most) + 1)

    def fill(selector: str) -> set[str]:
        boxes = page.locator(f"#tree .node.candidate{selector} rect")
        return set(boxes.evaluate_all("boxes => boxes.map(b => getComputedStyle(b).fill)"))

    accepted = fill(".accepted")
    assert len(accepted) == 1
    assert not accepted & fill(":not(.accepted)")


def test_the_text_of_a_step_has_its_tokens_marked(page: Page, generation: Generation) -> None:
    for number, step in enumerate(generation.steps, start=1):
        show_with_slider(page, number)
        start = step.context_length
        before = page.locator("#text .prompt").text_content() or ""
        before += page.locator("#text .before").text_content() or ""
        assert before == generation.context(step)
        marks = [mark.replace("↵\n", "\n") for mark in page.locator("mark").all_text_contents()]
        assert marks == generation.pieces[start : start + len(step.emitted)]


def test_no_node_lies_upon_another(page: Page, generation: Generation) -> None:
    large = max(generation.steps, key=lambda step: len(step.tokens))
    show_with_slider(page, generation.steps.index(large) + 1)
    boxes = page.locator("#tree .node rect").evaluate_all(
        "all => all.map(b => b.getBoundingClientRect()).map(r => [r.x, r.y, r.right, r.bottom])"
    )
    assert len(boxes) == NODES + 2
    for at, a in enumerate(boxes):
        for b in boxes[:at]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_keys_move_between_the_steps_and_stop_at_the_ends(
    page: Page, generation: Generation
) -> None:
    def after(key: str) -> int:
        page.keyboard.press(key)
        return int(page.locator("#step-number").inner_text())

    last = len(generation.steps)
    keys = ["ArrowLeft", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home"]
    assert [after(key) for key in keys] == [1, 2, 3, 2, last, last, 1]
    # A key press moves a focused slider by one step, too.
    page.locator("#slider").focus()
    assert after("ArrowRight") == 2


def test_a_node_tells_its_chances_and_its_fate(page: Page, generation: Generation) -> None:
    number, step = next(
        (number, step)
        for number, step in enumerate(generation.steps, start=1)
        if step.accepted and len(step.children(-1)) > 1
    )
    show_with_slider(page, number)
    taken = step.accepted[0]
    missed = next(node for node in step.children(-1) if node != taken)
    for node, fate in ((taken, "Accepted"), (missed, "Not accepted: here the target took")):
        page.locator("#tree .node.candidate").nth(node).hover()
        tip = page.locator("#tip").inner_text()
        assert fate in tip
        assert f"{step.value(node):.4g}" in tip
    page.mouse.move(1, 1)
    assert page.locator("#tip").is_hidden()


def test_nodes_of_several_sources_are_coloured_by_them(
    page: Page, generation: Generation, tmp_path: Path
) -> None:
    def drawn(sources: Sequence[Source]) -> tuple[list[set[str]], list[str]]:
        """Return the colours of each source's nodes, and the lines of the legend."""
        steps = [
            replace(
                step, sources=[sources[node % len(sources)] for node in range(len(step.tokens))]
            )
            for step in generation.steps
        ]
        path = tmp_path / "page.html"
        path.write_text(render(replace(generation, steps=steps)), "utf-8")
        with page.context.new_page() as other:
            other.goto(path.as_uri())
            boxes = [
                other.locator(f"#tree .node.{source}:not(.accepted) rect") for source in sources
            ]
            strokes = "boxes => boxes.map(box => getComputedStyle(box).stroke)"
            colours = [{*each.evaluate_all(strokes)} for each in boxes]
            return colours, other.locator("#sources:not([hidden]) span").all_inner_texts()

    colours, legend = drawn(SOURCES)
    assert [len(each) for each in colours] == [1, 1, 1]
    assert len(set.union(*colours)) == 3
    assert legend == [meaning(source) for source in SOURCES]
    assert drawn(["look_up"])[1] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_systems_theme_until_it_is_turned(page: Page, scheme: Any) -> None:
    def brightness() -> float:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3

    page.emulate_media(color_scheme=scheme)
    assert (brightness() > 128) == (scheme == "light")
    page.keyboard.press("t")
    assert (brightness() > 128) == (scheme == "dark")


def test_a_step_can_be_linked_to(page: Page) -> None:
    page.evaluate("location.hash = '#step=2'")
    page.wait_for_function("document.getElementById('step-number').textContent === '2'")


def test_playing_goes_through_the_steps(page: Page, generation: Generation) -> None:
    page.clock.install()
    page.reload()
    page.keyboard.press("Space")
    page.clock.run_for(2 * 1600)
    assert int(page.locator("#step-number").inner_text()) == 4
    page.keyboard.press("Space")
    page.clock.run_for(5 * 1600)
    assert int(page.locator("#step-number").inner_text()) == 4


def box(page: Page, number: int) -> dict[str, float]:
    """Return where a node of the tree is in the window."""
    found: Any = page.locator("#tree .node.candidate").nth(number).bounding_box()
    return dict(found)


def label_pixels(page: Page) -> float:
    """Return the size of the letters of a node, as they are shown."""
    found: float = page.evaluate("""() => {
        const label = document.querySelector("#tree .node text");
        return parseFloat(getComputedStyle(label).fontSize) * label.getScreenCTM().a;
    }""")
    return found


def test_a_large_tree_can_be_read_at_1280_by_800(page: Page, generation: Generation) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    for number, step in enumerate(generation.steps, start=1):
        page.evaluate(f"location.hash = 'step={number}'")
        page.wait_for_function(f"document.querySelector('#step-number').textContent == {number}")
        assert len(step.tokens) > 16
        assert label_pixels(page) >= 11


def test_the_wheel_zooms_and_keeps_what_is_below_the_pointer(page: Page) -> None:
    before, letters = box(page, 0), label_pixels(page)
    page.mouse.move(before["x"] + 5, before["y"] + 5)
    page.keyboard.down("Control")
    for _ in range(4):
        page.mouse.wheel(0, -150)
    page.keyboard.up("Control")
    page.wait_for_function("zoomed")
    after = box(page, 0)
    assert label_pixels(page) > 1.5 * letters
    assert after["width"] > 1.5 * before["width"]
    grown = after["width"] / before["width"]
    # The stage cannot be scrolled beyond its beginning.
    assert after["y"] + 5 * grown == pytest.approx(before["y"] + 5, abs=4)
    assert after["x"] + 5 * grown >= before["x"] + 5 - 4


def test_a_zoomed_tree_is_dragged_and_stays_zoomed_in_the_next_step(page: Page) -> None:
    fitted = label_pixels(page)
    for _ in range(4):
        page.keyboard.press("+")
    letters = label_pixels(page)
    assert letters > 2 * fitted
    stage: Any = page.locator("#stage").bounding_box()
    x, y = stage["x"] + stage["width"] / 2, stage["y"] + stage["height"] / 2
    before = box(page, 0)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 60, y - 40, steps=4)
    page.mouse.up()
    after = box(page, 0)
    assert (before["x"] - after["x"], before["y"] - after["y"]) == pytest.approx((60, 40), abs=2)
    page.keyboard.press("ArrowRight")
    assert label_pixels(page) == pytest.approx(letters, rel=1e-3)
    page.locator("#fitted").click()
    assert label_pixels(page) < letters
    assert page.locator("#fitted").text_content() != "400%"


def test_the_buttons_zoom_and_the_numbers_say_how_far(page: Page) -> None:
    before = label_pixels(page)
    page.locator("#larger").click()
    assert label_pixels(page) == pytest.approx(1.25 * before, rel=1e-3)
    page.locator("#smaller").click()
    assert label_pixels(page) == pytest.approx(before, rel=1e-3)
    assert page.locator("#fitted").text_content() == f"{100 * before / 14:.0f}%"
