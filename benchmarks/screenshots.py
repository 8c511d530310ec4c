"""Take the screenshots of the documentation: the report of ``results/`` and the demo's page.

    alignmixup report results --out build/report
    alignmixup demo --out build/demo
    python benchmarks/screenshots.py build/report/report.html build/demo/report.html

Prints what the report weighs and how long it takes to load and to draw, the median of three.
Needs playwright and a Chromium (``make browser``).
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import statistics
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
PHONE, DESKTOP = (390, 844), (1200, 850)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("report", type=Path, help="the page of alignmixup report results")
    parser.add_argument("demo", type=Path, help="the page of alignmixup demo")
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder of the images")
    args = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("no Chromium on this machine: make browser")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        print(_weight(args.report), _times(browser, args.report), sep="\n")
        shots = {
            "report_desktop.png": (args.report, DESKTOP, "light", ""),
            "report_phone.png": (args.report, PHONE, "light", ""),
            "report_charts.png": (args.report, (1200, 1000), "dark", "Calibration"),
            "report_pictures.png": (args.demo, (1200, 900), "light", "Aligned features"),
            "demo_page.png": (args.demo, (1100, 1700), "light", ""),
        }
        for name, (path, size, scheme, section) in shots.items():
            page = _opened(browser, path, size, scheme)
            if section == "Calibration":  # the diagrams of one data set, close to their table
                page.select_option("#place", "CIFAR-10, R-18")
            if section:
                page.locator("section", has=page.locator("h2", has_text=section)).evaluate(
                    "e => window.scrollTo(0, e.offsetTop - 70)"
                )
                page.wait_for_timeout(500)
            page.screenshot(path=args.out / name)
            page.close()
            print(args.out / name)
        browser.close()


def _opened(browser: Browser, path: Path, size: tuple[int, int], scheme: str) -> Page:
    """Open a page and wait until its charts are drawn."""
    page = browser.new_page(
        viewport={"width": size[0], "height": size[1]},
        color_scheme=scheme,  # type: ignore[arg-type]
    )
    page.goto(path.resolve().as_uri())
    num_charts = page.locator("figure.chart:visible").count()
    page.wait_for_function(
        "n => document.querySelectorAll('figure.chart svg.marks').length >= n", arg=num_charts
    )
    return page


def _weight(path: Path) -> str:
    content = path.read_bytes()
    return f"{len(content) / 1e6:.2f} MB, {len(gzip.compress(content)) / 1e6:.2f} MB compressed"


def _times(browser: Browser, path: Path) -> str:
    loads, draws = [], []
    for _ in range(3):
        start = time.perf_counter()
        page = _opened(browser, path, DESKTOP, "light")
        draws.append(time.perf_counter() - start)
        loads.append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
        num_charts = page.locator("figure.chart:visible").count()
        page.close()
    return (
        f"loads in {statistics.median(loads) / 1e3:.2f} s, has drawn its {num_charts} charts after "
        f"{statistics.median(draws):.2f} s (Chromium {browser.version})"
    )


if __name__ == "__main__":
    main()
