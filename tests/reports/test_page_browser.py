"""The page as people see it: in Chromium, wide and on a phone, light and dark, printed, and by keyboard alone.

Pictures are not compared with stored ones, which would differ with the fonts of a machine. What is compared is where
things lie, whether text is cut off, whether charts have ink in their colours, and the contrast of computed colours.
"""

import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from dpgrad.reports import chart, report
from dpgrad.reports.page import Beside, page
from dpgrad.training.fit import Fitted

BROWSER = Path(__file__).resolve().parents[1] / "browser.sh"
VIEWS = {
    f"{name}, {scheme}": {"viewport": size, "color_scheme": scheme}
    for name, size in (("wide", {"width": 1200, "height": 800}), ("phone", {"width": 390, "height": 844}))
    for scheme in ("light", "dark")
}

# Elements beyond the sides of the window, text that is cut off, and text of a chart outside it.
CUT_OFF = """() => {
  const width = document.documentElement.scrollWidth, wide = width > innerWidth ? [`the page is ${width} wide`] : [];
  const shown = [...document.body.querySelectorAll("*")].filter(e => e.getClientRects().length && !e.closest("svg"));
  const name = e => `${e.tagName} ${(e.textContent || "").slice(0, 40)}`;
  const beside = shown.filter(e => {
    const r = e.getBoundingClientRect(); return r.left < -0.5 || r.right > innerWidth + 0.5; });
  const cut = shown.filter(e => e.clientWidth && (e.scrollWidth > e.clientWidth + 1
    || (e.scrollHeight > e.clientHeight + 1 && getComputedStyle(e).overflowY !== "visible")));
  const labels = [...document.querySelectorAll("svg text")].filter(t => {
    const r = t.getBoundingClientRect(), s = t.closest("svg").getBoundingClientRect();
    return r.left < s.left - 1 || r.right > s.right + 1 || r.top < s.top - 1 || r.bottom > s.bottom + 1; });
  return wide.concat(beside.map(e => "beside: " + name(e)), cut.map(e => "cut: " + name(e)),
                     labels.map(e => "outside its chart: " + name(e)));
}"""

# The contrast (WCAG 2.2) of every text and every line of a chart with what lies behind it, the lowest first.
CONTRAST = """() => {
  const parse = c => { const n = c.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const light = c => { const [r, g, b] = c.slice(0, 3).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92
    : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => { for (let n = e; n; n = n.parentElement) { const c = parse(getComputedStyle(n).backgroundColor);
    if (c[3] === 1) return c; } return [255, 255, 255, 1]; };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05); };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || e.closest("script, style") || !e.getClientRects().length) continue;
    const style = getComputedStyle(e), colour = parse(e.closest("svg") ? style.fill : style.color);
    found.push(["text", ratio(colour, behind(e)), text.slice(0, 40)]);
  }
  for (const e of document.querySelectorAll("svg [id^=line2d] path")) {
    const stroke = getComputedStyle(e).stroke;
    if (e.closest("[id^=axes]") && stroke !== "none" && !e.closest("[id^=xtick], [id^=ytick]"))
      found.push(["line", ratio(parse(stroke), behind(e)), stroke]);
  }
  return found.sort((a, b) => a[1] - b[1]);
}"""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = subprocess.run(["sh", str(BROWSER)], capture_output=True, encoding="utf-8")
    if found.returncode:
        pytest.fail(found.stderr.strip())
    flags = ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as started:
        made = started.chromium.launch(executable_path=found.stdout.strip(), args=flags + root)
        yield made
        made.close()


def lowered(made: report.Report, factor: float) -> report.Report:
    """The report with other curves, which lie beside those of the first."""
    figures = ("held_out", "epsilon", "clip", "learning_rate")
    curves = [{**point, **{name: point[name] * factor for name in figures}} for point in made["curves"]]
    return {**made, "curves": curves}


@pytest.fixture(scope="session")
def written(fitted: Fitted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with three runs, one of them not for release and one with a long name, and one without privacy."""
    made = report.privacy(fitted)
    seeded = {**lowered(made, 0.8), "release": {"allowed": False, "reason": report.SEEDED}}
    runs = {"dpsgd": made, "dpsgd-momentum": seeded, "runs/of/a_folder_with_a_long_name": lowered(made, 0.6)}
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(runs, Beside("accuracy", 0.98), "Together they cost more: ε = 3.2 at δ = 1e-4"), "utf-8")
    return path


class Seen:
    """A page that was opened without a network, and what the browser said about it."""

    def __init__(self, browser: Browser, path: Path, **view: Any) -> None:
        self.context = browser.new_context(offline=True, **view)
        self.page: Page = self.context.new_page()
        self.said: list[str] = []
        self.fetched: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.fetched.append(request.url))
        self.page.goto(path.as_uri())


@pytest.fixture(scope="module", params=VIEWS)
def seen(request: pytest.FixtureRequest, browser: Browser, written: Path) -> Iterator[Seen]:
    found = Seen(browser, written, **VIEWS[request.param])
    yield found
    found.context.close()


def pixels(png: bytes) -> "np.ndarray[Any, Any]":
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def near(picture: "np.ndarray[Any, Any]", colour: str) -> int:
    """How many pixels have about this colour."""
    wanted = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return int((np.abs(picture - wanted).max(axis=-1) < 24).sum())


class TestInEveryView:
    def test_nothing_is_fetched_and_nothing_fails(self, seen: Seen, written: Path) -> None:
        assert seen.fetched == [written.as_uri()]
        assert seen.said == []

    def test_nothing_is_cut_off(self, seen: Seen) -> None:
        assert seen.page.evaluate(CUT_OFF) == []

    def test_contrast(self, seen: Seen) -> None:
        found = seen.page.evaluate(CONTRAST)
        assert len(found) > 100
        assert {kind for kind, _, _ in found} == {"text", "line"}
        low = [entry for entry in found if entry[1] < (4.5 if entry[0] == "text" else 3.0)]
        assert low == []

    def test_paper_is_light_or_dark(self, seen: Seen) -> None:
        dark = seen.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        paper = pixels(seen.page.screenshot())[:, :3]  # the left margin
        assert paper.mean() < 60 if dark else paper.mean() > 250

    def test_charts_are_drawn(self, seen: Seen) -> None:
        figures = seen.page.locator(".charts figure")
        assert figures.count() == 4
        for place in range(4):
            picture = pixels(figures.nth(place).screenshot())
            for colour in chart._COLOURS[:3]:  # one line a run
                assert near(picture, colour) > 60, (place, colour)
            assert near(picture, chart._COLOURS[4]) < 20  # no fifth

    def test_text_is_large_enough(self, seen: Seen) -> None:
        heights = seen.page.evaluate(
            "[...document.querySelectorAll('svg text')].map(t => parseFloat(getComputedStyle(t).fontSize) * "
            "t.getScreenCTM().a)"
        )
        assert len(heights) > 30
        assert min(heights) >= 8

    def test_every_run_says_what_it_is(self, seen: Seen) -> None:
        text = seen.page.inner_text("body")
        for words in (
            "dpsgd-momentum is not for release",
            "outside every guarantee",
            "Together they cost more",
            "98.0 %",
        ):
            assert words in text


def test_by_keyboard(browser: Browser, written: Path) -> None:
    opened = Seen(browser, written, **VIEWS["phone, dark"])
    links = opened.page.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))")
    assert len(links) == 4
    for link in links:
        opened.page.keyboard.press("Tab")
        focus = opened.page.evaluate(
            "(() => { const a = document.activeElement, s = getComputedStyle(a), r = a.getBoundingClientRect();"
            "return [a.getAttribute('href'), s.outlineStyle, parseFloat(s.outlineWidth), r.top >= 0 && "
            "r.bottom <= innerHeight]; })()"
        )
        assert focus[0] == link  # in the order of the page
        assert focus[1] != "none"
        assert focus[2] >= 2
        assert focus[3]
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_function("location.hash !== ''")
    assert opened.page.evaluate("location.hash") == links[-1]
    assert opened.page.evaluate(f"document.querySelector('{links[-1]}').getBoundingClientRect().top < innerHeight")
    opened.context.close()


def test_in_print(browser: Browser, written: Path) -> None:
    """Black on white whatever the screen is, without the links, and whole: a sheet has no bar to scroll."""
    opened = Seen(browser, written, viewport={"width": 700, "height": 1000}, color_scheme="dark")  # A4 with margins
    opened.page.emulate_media(media="print", color_scheme="dark")
    assert opened.page.evaluate(CUT_OFF) == []
    assert opened.page.evaluate(CONTRAST)[0][1] >= 3
    assert pixels(opened.page.screenshot())[:, -2:].mean() > 250
    assert not opened.page.locator("nav").is_visible()
    assert opened.page.pdf(format="A4").startswith(b"%PDF")
    opened.context.close()


def test_one_run_alone(browser: Browser, fitted: Fitted, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page({"a": report.privacy(fitted)}), "utf-8")
    opened = Seen(browser, path, **VIEWS["phone, light"])
    assert opened.said == []
    assert opened.page.evaluate(CUT_OFF) == []
    assert opened.page.locator(".charts figure").count() == 4
    opened.context.close()


def test_the_checks_notice_faults(browser: Browser, written: Path, tmp_path: Path) -> None:
    """Each fault, put into the page, is found by one of the checks above."""
    text = written.read_text("utf-8")
    faults = {
        "wide": '<div style="width: 900px">wide</div>',
        "cut": '<div style="width: 90px; overflow: hidden; white-space: nowrap">a text that does not fit</div>',
        "pale": '<p style="color: #999; background: #fff">pale</p>',
        "fetched": '<img src="http://localhost/picture.png">',
        "script": "<script>throw new Error('a fault')</script>",
    }
    for name, fault in faults.items():
        path = tmp_path / f"{name}.html"
        path.write_text(text.replace("</body>", f"{fault}</body>"), "utf-8")
        opened = Seen(browser, path, **VIEWS["phone, light"])
        opened.page.wait_for_load_state("load")
        found = {
            "wide": opened.page.evaluate(CUT_OFF) != [],
            "cut": opened.page.evaluate(CUT_OFF) != [],
            "pale": opened.page.evaluate(CONTRAST)[0][1] < 3 and opened.page.evaluate(CONTRAST)[0][2] == "pale",
            "fetched": len(opened.fetched) > 1,
            "script": any("a fault" in said for said in opened.said),
        }
        assert found[name], name
        opened.context.close()


def test_without_a_browser_the_reason_is_one_line() -> None:
    done = subprocess.run(
        ["sh", str(BROWSER), "install"],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "CHROMIUM": "/absent"},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "need /absent: install it" in done.stderr
