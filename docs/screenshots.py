"""Take the pictures in docs/images from the recorded run.

python -m docs.screenshots [FOLDER]
"""

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Browser, Page, expect

from docs.recording import unpack
from tests.browser.chromium import chromium
from tests.browser.served import serve_folder

IMAGES = Path(__file__).parent / "images"
JOB = "tiny-reasoner-1"


class Shot(NamedTuple):
    name: str
    scheme: str
    width: int
    height: int
    # id of the section to scroll to
    section: str = ""


SHOTS = (
    Shot("light", "light", 1280, 1480),
    Shot("dark", "dark", 1280, 1480),
    Shot("phone", "light", 390, 1200),
    Shot("learning", "light", 1280, 1180, "learning"),
    Shot("samples", "light", 1280, 900, "samples"),
)


def take(browser: Browser, address: str, folder: Path) -> None:
    """Photograph the dashboard at `address`, which serves the recorded run."""
    for shot in SHOTS:
        _take(browser, address, shot, folder / f"dashboard-{shot.name}.png")


def _take(browser: Browser, address: str, shot: Shot, file: Path) -> None:
    context = browser.new_context(
        viewport={"width": shot.width, "height": shot.height},
        color_scheme="dark" if shot.scheme == "dark" else "light",
        reduced_motion="reduce",
        timezone_id="UTC",
        locale="en-GB",
    )
    page = context.new_page()
    page.goto(f"{address}#/job/{JOB}/{shot.section}")
    _settle(page, shot.section)
    page.screenshot(path=file)
    context.close()


def _settle(page: Page, section: str) -> None:
    expect(page.locator("#lanes")).to_be_visible(timeout=30000)
    if section:
        expect(page.locator(f"#{section}")).to_be_in_viewport()
    if section == "samples":
        expect(page.locator("#samples .answer").first).to_be_visible()
    page.wait_for_function("document.querySelectorAll('.uplot').length >= 14")


if __name__ == "__main__":
    into = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    into.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as home,
        serve_folder(unpack(Path(home) / JOB)) as address,
        chromium() as browser,
    ):
        take(browser, address, into)
