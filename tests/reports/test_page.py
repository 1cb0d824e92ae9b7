"""The page stands alone: nothing from elsewhere, every run in it, and nothing that a name could break."""

import json
import re
from html.parser import HTMLParser

import pytest

from dpgrad.accounting.guarantee import up
from dpgrad.reports import report
from dpgrad.reports.chart import _COLOURS, Chart
from dpgrad.reports.page import NonPrivate, page
from dpgrad.reports.style import STYLE
from dpgrad.training.fit import Fitted


@pytest.fixture(scope="module")
def made(fitted: Fitted) -> report.Report:
    return report.report(fitted)


class Links(HTMLParser):
    """What a page would fetch, and the text it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.shown = ""
        self._hidden = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._hidden = tag if tag in ("script", "style") else self._hidden
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data", "action") and not (value or "").startswith("#"):
                self.fetched.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = "" if tag == self._hidden else self._hidden

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.shown += data


def read(text: str) -> Links:
    found = Links()
    found.feed(text)
    return found


def test_it_stands_alone(made: report.Report) -> None:
    text = page({"a": made})
    found = read(text)
    assert found.fetched == []
    assert not {"link", "img", "iframe", "object", "embed"} & set(found.tags)
    assert not re.search(r"@import|url\((?!#)", text)
    assert len(text) < 5_000_000
    assert len(re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", text)) < 200_000


def test_every_run_is_in_it(made: report.Report) -> None:
    found = read(page({"first": made, "second": made}, NonPrivate("accuracy", 0.98), "all together ε = 3"))
    assert found.tags.count("svg") == 7  # five charts of all runs, and the trade-off of each
    for words in ("first", "second", "non-private", "98.0 %", "outside every guarantee", "all together ε = 3",
                  "accuracy on held-out rows", "clip bound", "learning rate", "held-out rows"):  # fmt: skip
        assert words in found.shown
    for name, fact in report.facts(made):
        assert name in found.shown
        assert fact in found.shown


def test_the_reports_can_be_read_from_it(made: report.Report) -> None:
    text = page({"a": made})
    embedded = re.search(r'<script type="application/json" id="reports">(.*?)</script>', text, re.DOTALL)
    assert embedded is not None
    assert json.loads(embedded[1]) == {"a": made}


def test_a_name_cannot_break_it(made: report.Report) -> None:
    name = "</script><script>alert(1)</script>"
    found = read(page({name: made}))
    assert found.tags.count("script") == read(page({"a": made})).tags.count("script")
    assert name in found.shown


def test_the_way_is_shown_and_cannot_break_it(made: report.Report) -> None:
    assert "batched: no operation depends on values" in read(page({"a": made})).shown
    odd = {**made, "way": {"name": "certified", "reason": "</td><script>x</script>", "cost": "<b>much</b>"}}
    found = read(page({"a": odd}))
    assert found.tags.count("script") == read(page({"a": made})).tags.count("script")
    assert "b" not in found.tags
    assert "certified: </td><script>x</script>; every batch is checked, which costs <b>much</b>" in found.shown


def test_a_report_of_the_first_format(made: report.Report) -> None:
    old = {name: value for name, value in made.items() if name != "way"}
    assert "batched" not in read(page({"a": old})).shown


def test_a_seeded_run_is_marked(made: report.Report, short: object) -> None:
    assert "is not for release" not in page({"a": made})
    seeded = {**made, "release": {"allowed": False, "reason": report.SEEDED}}
    assert "<b>a is not for release</b>" in page({"a": seeded})


def test_without_held_out_rows(made: report.Report) -> None:
    points = [{**point, "held_out": None} for point in made["curves"]]
    unseen = {**made, "curves": points, "result": {**made["result"], "held_out": None}}
    assert read(page({"a": unseen})).tags.count("svg") == 4  # with the trade-off


def test_no_runs() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        page({})


def test_charts_are_the_same_every_time() -> None:
    chart = Chart("accuracy", {"a": ([1, 2], [0.5, 0.9]), "b": ([1], [0.4])}, ("non-private", 0.98))
    assert chart.html() == chart.html()
    assert "non-private" in chart.html()


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_line_can_be_seen_on_light_and_on_dark_paper() -> None:
    papers = re.findall(r"--paper: (#\w+)", STYLE)
    assert len(papers) == 2
    for paper in papers:
        behind = luminance(paper if len(paper) == 7 else "#" + "".join(2 * digit for digit in paper[1:]))
        for colour in _COLOURS:
            low, high = sorted((luminance(colour), behind))
            assert (high + 0.05) / (low + 0.05) >= 3, (colour, paper)


def test_a_long_name_fits_into_the_legend() -> None:
    chart = Chart("accuracy", {"a": ([1, 2], [0.5, 0.9]), "folder/" * 20 + "mine": ([1, 2], [0.4, 0.5])})
    drawn = chart.html().partition("</svg>")[0]
    assert "/mine<" in drawn
    assert "folder/" * 5 not in drawn


def test_shows_what_attacks_reach_as_a_picture_with_its_table(made: report.Report) -> None:
    attacks = made["guarantee"]["attacks"]
    text = page({"a": made})
    found = read(text)
    assert made["plain"]["attack"] in found.shown
    label = re.search(r'aria-label="(Least false negatives[^"]*)"', text)
    assert label is not None
    for one in attacks["power"]:
        assert f"{up(100 * one['power'])} %" in found.shown  # in the table under it
        assert up(100 * one["power"]) in label[1]
    assert up(attacks["membership_advantage"]) in found.shown
    earlier = {**made, "guarantee": {**made["guarantee"], "attacks": None}, "plain": {**made["plain"], "attack": None}}
    assert "What an attack can reach" not in page({"a": earlier})
