"""The page as people see it: in Chromium, wide and on a phone, light and dark, printed, and by keyboard alone."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from browsing import BROWSER, CONTRAST, CUT_OFF, LETTERS, VIEWS, Seen, near, pixels
from dpgrad.reports import chart, interactive, report
from dpgrad.reports.page import NonPrivate, page
from dpgrad.training.fit import Fitted


def lowered(made: report.Report, factor: float) -> report.Report:
    """The report with other curves, which lie beside those of the first."""
    figures = ("held_out", "epsilon", "clip", "learning_rate")
    curves = [{**point, **{name: point[name] * factor for name in figures}} for point in made["curves"]]
    return {**made, "curves": curves}


@pytest.fixture(scope="session")
def written(fitted: Fitted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with three runs, one of them not for release and one with a long name, and one without privacy."""
    made = report.report(fitted)
    seeded = {**lowered(made, 0.8), "release": {"allowed": False, "reason": report.SEEDED}}
    runs = {"dpsgd": made, "dpsgd-momentum": seeded, "runs/of/a_folder_with_a_long_name": lowered(made, 0.6)}
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(runs, NonPrivate("accuracy", 0.98), "Together they cost more: ε = 3.2 at δ = 1e-4"), "utf-8")
    return path


@pytest.fixture(scope="module", params=VIEWS)
def seen(request: pytest.FixtureRequest, browser: Browser, written: Path) -> Iterator[Seen]:
    found = Seen(browser, written, **VIEWS[request.param])
    yield found
    found.context.close()


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
        assert figures.count() == 5
        for place in range(5):
            picture = pixels(figures.nth(place).screenshot())
            for colour in chart._COLOURS[:3]:  # one line a run
                assert near(picture, colour) > (20 if place == 1 else 60), (place, colour)  # by ε a line may be short
            assert near(picture, chart._COLOURS[4]) < 20  # no fifth

    def test_text_is_large_enough(self, seen: Seen) -> None:
        heights = seen.page.evaluate(LETTERS)
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


def test_ticking_compares_runs(browser: Browser, written: Path) -> None:
    """A run that is not ticked leaves the charts, their numbers and the reports; by mouse and by keyboard."""
    opened = Seen(browser, written, **VIEWS["wide, light"])
    first, charts = chart._COLOURS[0], opened.page.locator(".charts figure")
    for place in range(5):
        assert near(pixels(charts.nth(place).screenshot()), first) > 60
    opened.page.click("#tick-1")
    opened.drawn()
    for place in range(5):
        picture = pixels(charts.nth(place).screenshot())
        assert near(picture, first) < 20, place
        assert near(picture, chart._COLOURS[1]) > 60, place  # the others stay, the axes too
    assert not opened.page.locator("#report-1").is_visible()
    assert opened.page.locator("#report-2").is_visible()
    assert opened.page.get_by_label("dpsgd", exact=True).is_visible()  # to tick it again
    opened.page.focus("#tick-1")
    opened.page.keyboard.press("Space")
    opened.drawn()
    assert near(pixels(charts.nth(0).screenshot()), first) > 60
    assert opened.said == []
    opened.context.close()


def test_the_pointer_shows_values(browser: Browser, written: Path, fitted: Fitted) -> None:
    """Over a chart the value of every run is shown, in words of the page's data."""
    opened = Seen(browser, written, **VIEWS["wide, dark"])
    chart = opened.page.locator(".charts .plot").nth(2)  # ε over steps
    chart.scroll_into_view_if_needed()
    place = chart.locator(".nsewdrag").bounding_box()
    assert place is not None
    opened.page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    hover = chart.locator(".hoverlayer .legend")
    hover.wait_for()
    said = hover.text_content() or ""
    told = {f"{point['epsilon']:.6g}" for point in report.report(fitted)["curves"]}
    for name in ("dpsgd", "dpsgd-momentum", "runs/of/a_folder_with_a_long_name"):
        assert name in said or name[-31:] in said
    assert any(value in said for value in told)
    assert opened.said == []
    opened.context.close()


@pytest.mark.parametrize("view", ["wide, light", "phone, dark"])
def test_the_page_of_one_run(browser: Browser, fitted: Fitted, tmp_path: Path, view: str) -> None:
    """Values appear between points that lie far apart; labels do not overlap; a small δ stays on one line."""
    made = report.report(fitted)
    few = {**made, "curves": made["curves"][:2]}
    (tmp_path / "report.html").write_text(page({"run": few}, NonPrivate("accuracy", 0.98)), "utf-8")
    opened = Seen(browser, tmp_path / "report.html", **VIEWS[view])
    plot = opened.page.locator(".charts .plot").first
    plot.scroll_into_view_if_needed()
    place = plot.locator(".nsewdrag").bounding_box()
    assert place is not None
    opened.page.mouse.move(place["x"] + 0.4 * place["width"], place["y"] + place["height"] / 2)
    hover = plot.locator(".hoverlayer .legend")
    hover.wait_for()
    assert f"{few['curves'][0]['held_out']:.6g}" in (hover.text_content() or "")
    labels = [label.bounding_box() for label in opened.page.locator(".reach .annotation-text-g").all()]
    assert len(labels) == 2
    upper, lower = (label for label in labels if label is not None)
    assert upper["y"] + upper["height"] <= lower["y"] + 1
    assert all(0 < label["height"] < 30 for label in (upper, lower))
    if view.startswith("wide"):  # the δ of 1e-05 has a hyphen, at which a line may break
        lines = "e => { const r = document.createRange(); r.selectNodeContents(e); return r.getClientRects().length; }"
        assert {cell.evaluate(lines) for cell in opened.page.locator(".runs td.figure").all()} == {1}
    opened.context.close()


def test_without_scripts_and_in_print_matplotlib_drew_the_charts(browser: Browser, written: Path) -> None:
    context = browser.new_context(offline=True, java_script_enabled=False, **VIEWS["wide, light"])
    plain = context.new_page()
    plain.goto(written.as_uri())
    assert plain.locator(".charts .chart > svg").first.is_visible()
    assert near(pixels(plain.locator(".charts figure").nth(0).screenshot()), chart._COLOURS[0]) > 60
    context.close()
    opened = Seen(browser, written, **VIEWS["wide, light"])
    static, live = opened.page.locator(".charts .chart > svg").first, opened.page.locator(".charts .plots").first
    assert (static.is_visible(), live.is_visible()) == (False, True)
    opened.page.emulate_media(media="print")
    assert (static.is_visible(), live.is_visible()) == (True, False)
    opened.context.close()


def test_the_page_is_small_and_whole_without_plotly(
    written: Path, fitted: Fitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert written.stat().st_size < 5_000_000
    monkeypatch.setattr(interactive, "_packed", lambda: "")
    alone = page({"a": report.report(fitted)})
    assert "<svg" in alone
    assert 'class="plots"' not in alone
    assert "Plotly" not in alone


def test_numbers_stand_under_every_chart(browser: Browser, written: Path, fitted: Fitted) -> None:
    opened = Seen(browser, written, **VIEWS["phone, light"])
    points = len(report.report(fitted)["curves"])
    for place in range(5):
        figure = opened.page.locator(".charts figure").nth(place)
        assert not figure.locator("table").is_visible()
        figure.locator("summary").click()
        assert figure.locator("table tr").count() == 1 + 3 * points
    assert opened.page.evaluate(CUT_OFF) == []
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
    path.write_text(page({"a": report.report(fitted)}), "utf-8")
    opened = Seen(browser, path, **VIEWS["phone, light"])
    assert opened.said == []
    assert opened.page.evaluate(CUT_OFF) == []
    assert opened.page.locator(".charts figure").count() == 5
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
