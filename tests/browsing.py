"""A page in Chromium: how it is opened, and what is looked at wherever it is shown.

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

BROWSER = Path(__file__).resolve().parent / "browser.sh"
VIEWS = {
    f"{name}, {scheme}": {"viewport": size, "color_scheme": scheme}
    for name, size in (("wide", {"width": 1200, "height": 800}), ("phone", {"width": 390, "height": 844}))
    for scheme in ("light", "dark")
}

# Elements beyond the sides of the window, text that is cut off, and text of a chart outside it.
CUT_OFF = """() => {
  const width = document.documentElement.scrollWidth, wide = width > innerWidth ? [`the page is ${width} wide`] : [];
  const drawn = e => e.getClientRects().length, all = [...document.body.querySelectorAll("*")];
  const shown = all.filter(e => drawn(e) && !e.closest("svg, .plot"));
  const name = e => `${e.tagName} ${(e.textContent || "").slice(0, 40)}`;
  const beside = shown.filter(e => {
    const r = e.getBoundingClientRect(); return r.left < -0.5 || r.right > innerWidth + 0.5; });
  const cut = shown.filter(e => e.clientWidth && (e.scrollWidth > e.clientWidth + 1
    || (e.scrollHeight > e.clientHeight + 1 && getComputedStyle(e).overflowY !== "visible")));
  const labels = [...document.querySelectorAll("svg text")].filter(drawn).filter(t => {
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
  for (const e of document.querySelectorAll("svg [id^=line2d] path, svg path.js-line")) {
    const stroke = getComputedStyle(e).stroke;
    const tick = e.closest("[id^=xtick], [id^=ytick]"), line = e.closest("[id^=axes], .scatterlayer");
    if (e.getClientRects().length && line && !tick && stroke !== "none")
      found.push(["line", ratio(parse(stroke), behind(e)), stroke]);
  }
  return found.sort((a, b) => a[1] - b[1]);
}"""


# How high the letters of each chart are, in pixels of the screen.
LETTERS = """() => [...document.querySelectorAll("svg text")].filter(t => t.getClientRects().length).map(t =>
  parseFloat(getComputedStyle(t).fontSize) * Math.hypot(t.getScreenCTM().a, t.getScreenCTM().b))"""


def launched() -> Iterator[Browser]:
    """Chromium, closed when the iterator goes on."""
    found = subprocess.run(["sh", str(BROWSER)], capture_output=True, encoding="utf-8")
    if found.returncode:
        pytest.fail(found.stderr.strip())
    flags = ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as started:
        made = started.chromium.launch(executable_path=found.stdout.strip(), args=flags + root)
        yield made
        made.close()


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
        if self.page.locator(".plots").count():
            self.drawn()

    def drawn(self) -> None:
        """Wait until Plotly has drawn every chart."""
        self.page.wait_for_selector("html[data-charts=drawn]", timeout=120_000)


def pixels(png: bytes) -> "np.ndarray[Any, Any]":
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def near(picture: "np.ndarray[Any, Any]", colour: str) -> int:
    """How many pixels have about this colour."""
    wanted = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return int((np.abs(picture - wanted).max(axis=-1) < 24).sum())
