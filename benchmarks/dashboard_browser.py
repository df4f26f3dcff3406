"""Open the dashboard's page in a browser and record paints and received updates."""

from typing import cast

from playwright.sync_api import Browser, Page

# records the journal entries that each update covers, and when it came
_LISTEN = """
window.received = [];
window.EventSource = class extends EventSource {
  constructor(url) {
    super(url);
    super.addEventListener("run", (event) => {
      const found = /"head":{.*?"entries":(\\d+)/.exec(event.data);
      if (found) window.received.push([Date.now() / 1000, Number(found[1])]);
    });
  }
};
"""
_PAINT = "performance.getEntriesByType('paint').find((e) => e.name === 'first-contentful-paint')"


def open_page(browser: Browser, address: str, job: str) -> Page:
    """Open the page in a fresh context and wait until its lanes are there."""
    page = browser.new_context(viewport={"width": 1360, "height": 900}).new_page()
    page.add_init_script(_LISTEN)
    page.goto(f"{address}#/job/{job}")
    page.locator("#lanes canvas").first.wait_for(timeout=60_000)
    return page


def first_paint(page: Page) -> float:
    """Return the seconds from navigation to the first paint."""
    page.wait_for_function(f"{_PAINT} !== undefined")
    return float(page.evaluate(f"{_PAINT}.startTime")) / 1000


def lanes_drawn(page: Page) -> float:
    """Return the seconds since navigation, an upper bound once the lanes are drawn."""
    return float(page.evaluate("performance.now()")) / 1000


def received(page: Page) -> list[tuple[float, int]]:
    """Return the time of each update and the number of journal entries that it covers."""
    found = cast("list[list[float]]", page.evaluate("window.received"))
    return [(at, int(entries)) for at, entries in found]
