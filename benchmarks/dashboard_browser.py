"""A browser that opens the dashboard's page: when it painted, and what it was told when."""

from typing import cast

from playwright.sync_api import Browser, Page

# what a message of the feed says of the journal, and when it came
_LISTEN = """
window.heard = [];
window.EventSource = class extends EventSource {
  constructor(url) {
    super(url);
    super.addEventListener("run", (event) => {
      const told = /"head":{.*?"entries":(\\d+)/.exec(event.data);
      if (told) window.heard.push([Date.now() / 1000, Number(told[1])]);
    });
  }
};
"""
_PAINT = "performance.getEntriesByType('paint').find((e) => e.name === 'first-contentful-paint')"


def open_page(browser: Browser, address: str, job: str) -> Page:
    """Without anything remembered of an earlier visit; until its lanes are drawn."""
    page = browser.new_context(viewport={"width": 1360, "height": 900}).new_page()
    page.add_init_script(_LISTEN)
    page.goto(f"{address}#/job/{job}")
    page.locator("#lanes canvas").first.wait_for(timeout=60_000)
    return page


def first_paint(page: Page) -> float:
    """Seconds after the address was asked for."""
    page.wait_for_function(f"{_PAINT} !== undefined")
    return float(page.evaluate(f"{_PAINT}.startTime")) / 1000


def lanes_drawn(page: Page) -> float:
    """Not later than that: seconds after the address was asked for."""
    return float(page.evaluate("performance.now()")) / 1000


def heard(page: Page) -> list[tuple[float, int]]:
    """When it was told of how many entries of the journal."""
    told = cast("list[list[float]]", page.evaluate("window.heard"))
    return [(at, int(entries)) for at, entries in told]
