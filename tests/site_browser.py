"""The built site in Chromium: `make docs-browser`.

Home, guides, a page of the API and a search, on two screens and on a phone of 390 pixels, light and dark: no page is
wider than its window, no words are cut off, all stand out from what is behind them (a contrast of 4.5, as WCAG 2.1 asks
at level AA), every picture and style is there, no script complains, nothing is asked of another host, and the search
finds what it is asked for. Not a test of pytest, since the site takes minutes to build. With --pictures, what was seen
is kept.
"""

import argparse
import contextlib
import functools
import http.server
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "home": "index.html",
    "guide": "docs/own_loop.html",
    "tables": "docs/benchmarks.html",
    "opacus": "docs/from_opacus.html",
    "estimators": "docs/scikit_learn.html",
    "errors": "docs/troubleshooting.html",
    "proof": "docs/proofs/secure_noise.html",
    "commands": "docs/commands.html",
    "api": "docs/api/modules/dpgrad.mechanism.mechanism.html",
    "search": "search.html?q=noise_multiplier",
}
# What is wrong with words on a page: cut off at the side, or hardly darker or lighter than what is behind them.
FAULTS_OF_WORDS = """() => {
    const found = [], channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    const numbers = (color) => {
        const canvas = new OffscreenCanvas(1, 1).getContext("2d");
        canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const behind = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const color = numbers(getComputedStyle(at).backgroundColor);
            if (color[3] === 255) return color;
        }
        return [255, 255, 255, 255];
    };
    for (const element of document.querySelectorAll("body *")) {
        const words = [...element.childNodes].filter((node) => node.nodeType === 3 && node.data.trim());
        const box = element.getBoundingClientRect(), style = getComputedStyle(element);
        if (!words.length || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
        if (box.width < 2 || box.height < 2 || box.right < 0 || box.left > innerWidth) continue;
        const said = words[0].data.trim().slice(0, 40);
        if (element.scrollWidth > element.clientWidth + 1 && ["hidden", "clip"].includes(style.overflowX))
            found.push(`cut off: ${said}`);
        const [one, other] = [light(numbers(style.color)), light(behind(element))].sort((a, b) => b - a);
        const contrast = (one + 0.05) / (other + 0.05);
        const kind = element.className || element.tagName;
        if (contrast < 4.5) found.push(`contrast ${contrast.toFixed(2)}: ${said} (${kind})`);
    }
    return found;
}"""
VIEWS = {
    "wide": {"width": 1440, "height": 900},
    "laptop": {"width": 1280, "height": 900},
    "phone": {"width": 390, "height": 844},
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a folder and says nothing."""

    def log_message(self, *_: object) -> None:
        pass

    def copyfile(self, *given: Any) -> None:
        """A page that is closed before it has everything is no error."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            super().copyfile(*given)


def faults(page: Page, name: str, address: str) -> list[str]:
    """What is wrong with a page as it is shown."""
    failed: list[str] = []
    page.on("response", lambda one: failed.append(f"{one.status} {one.url}") if one.status >= 400 else None)
    page.on("request", lambda one: None if one.url.startswith(address) else failed.append(f"asks for {one.url}"))
    page.on("pageerror", lambda error: failed.append(f"script: {error}"))
    page.on("console", lambda said: failed.append(f"{said.type}: {said.text}") if said.type != "log" else None)
    page.goto(f"{address}/{PAGES[name]}")
    page.wait_for_load_state("networkidle")
    if name == "home":
        page.wait_for_url("**/docs/index.html")
    if name == "search":
        page.wait_for_selector("#search-results li", timeout=60_000)
    wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    if wide[0] > wide[1]:
        failed.append(f"{wide[0]} pixels wide in a window of {wide[1]}")
    return failed + page.evaluate(FAULTS_OF_WORDS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", nargs="?", type=Path, default=ROOT / "build" / "docs")
    parser.add_argument("--pictures", type=Path)
    given = parser.parse_args()
    chromium = subprocess.run(
        ["sh", str(ROOT / "tests" / "browser.sh")], capture_output=True, text=True, check=True
    ).stdout.strip()
    served = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(given.site.resolve()))
    )
    threading.Thread(target=served.serve_forever, daemon=True).start()
    found: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            for view, size in VIEWS.items():
                for name, place in PAGES.items():
                    if not (given.site / place.partition("?")[0]).exists():
                        found.append(f"{place} is missing")
                        continue
                    page = browser.new_page(viewport=size, color_scheme=scheme)
                    wrong = faults(page, name, f"http://127.0.0.1:{served.server_port}")
                    found += [f"{name}, {view}, {scheme}: {one}" for one in wrong]
                    if given.pictures:
                        given.pictures.mkdir(parents=True, exist_ok=True)
                        page.screenshot(path=given.pictures / f"{name}-{view}-{scheme}.png", full_page=True)
                    page.close()
        browser.close()
    served.shutdown()
    print(*(sorted(set(found)) or ["every page is shown as it should be"]), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
