"""The page of experiments, in Chromium: wide and on a phone, light and dark, printed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from browsing import CONTRAST, CUT_OFF, LETTERS, VIEWS, Seen, near, pixels
from dpgrad.papers import page, running
from dpgrad.papers.experiment import Arm, Place
from dpgrad.papers.figures import COLOURS, curves
from toy_experiment import PLACE, TOY


def trial(arm: Arm, seed: int, place: Place) -> dict[str, object]:
    return {"accuracy": 90.0 + seed + arm.setting["better"], "epoch": [1, 2, 3], "by_epoch": [50.0, None, 80.0 + seed]}


NAMES = tuple(f"arm {number} & <its> long name" for number in range(6))
CURVED = replace(
    TOY, name="curved", item="Figure 2 <b>", trial=trial, also=("nothing", "steps_taken"), claims=TOY.claims[:1],
    arms=lambda size: tuple(Arm(name, {"better": float(place)}) for place, name in enumerate(NAMES)),
    printed={NAMES[0]: 91.5},
    draw=lambda outcomes, figure: curves(figure.add_subplot(), outcomes, "epoch", "by_epoch"),
)  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experiments: a table of the paper's size with its claims, and a partial figure of a small size."""
    folder = tmp_path_factory.mktemp("results")
    table = running.reproduce(TOY, PLACE, folder, seeds=3)
    figure = running.reproduce(CURVED, PLACE, folder, seeds=2)
    found = [replace(table, place=replace(PLACE, size="full")), replace(figure, lines=figure.lines[:-1])]
    return page.write(found, folder / page.SEVERAL)


@pytest.fixture(params=VIEWS)
def seen(request: pytest.FixtureRequest, browser: Browser, written: Path) -> Iterator[Seen]:
    found = Seen(browser, written, **VIEWS[request.param])
    yield found
    found.context.close()


def test_every_view(seen: Seen, written: Path) -> None:
    assert seen.fetched == [written.as_uri()]
    assert seen.said == []
    assert seen.page.evaluate(CUT_OFF) == []
    low = [one for one in seen.page.evaluate(CONTRAST) if one[1] < (4.5 if one[0] == "text" else 3.0)]
    assert low == []
    pictures = seen.page.locator("figure.paper")
    assert pictures.count() == 2
    assert near(pixels(pictures.nth(0).screenshot()), COLOURS[0]) > 30  # ours
    assert near(pixels(pictures.nth(0).screenshot()), COLOURS[1]) > 10  # the paper's
    heights = seen.page.evaluate(LETTERS)
    assert min(heights) >= 6.5
    seen.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert seen.page.evaluate(CUT_OFF) == []


def test_what_it_says(browser: Browser, written: Path) -> None:
    seen = Seen(browser, written, **VIEWS["wide, light"])
    table, figure = seen.page.locator("section").all()
    said = table.inner_text()
    for words in ("held: two is above one", "did not hold: one is above two", "cannot be told: three is above two"):
        assert words in said
    assert "two\t96.50\t96.00 ± 0.58" in said  # the paper beside ours
    told = figure.inner_text()
    assert "Partial: 11 of 12 trials." in told
    assert "every trial is a line of curved.tiny.jsonl" in told
    assert "not judged at this size" in told
    figure.locator("summary").nth(0).click()
    numbers = figure.locator("table.data").nth(0)
    assert numbers.inner_text().split("\n") == ["epoch\tby epoch", "1\t50", "2\t–", "3\t80.5"]
    seen.page.locator("nav a").nth(1).click()
    seen.page.wait_for_function("location.hash === '#curved'")
    assert figure.locator("h2").inner_text() == "Nobody 2026, Figure 2 <b>"
    seen.context.close()


def test_in_print(browser: Browser, written: Path) -> None:
    seen = Seen(browser, written, viewport={"width": 700, "height": 1000}, color_scheme="dark")
    seen.page.emulate_media(media="print", color_scheme="dark")
    assert seen.page.evaluate(CUT_OFF) == []
    assert not seen.page.locator("nav").is_visible()
    assert pixels(seen.page.screenshot())[:, -2:].mean() > 250
    seen.context.close()


def test_one_experiment_is_named_once(tmp_path: Path) -> None:
    found = page.page([running.reproduce(TOY, PLACE, tmp_path, seeds=1)])
    assert "<title>Nobody 2026, Table 1</title>" in found
    assert "<h1>Nobody 2026</h1>" in found
    assert "<h2>Table 1</h2>" in found


def test_an_experiment_that_has_not_run(tmp_path: Path) -> None:
    done = running.reproduce(TOY, PLACE, tmp_path, run=False)
    assert "No trial has been run." in page.page([done])
    with pytest.raises(ValueError, match="at least one experiment"):
        page.page([])
