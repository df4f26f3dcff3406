"""The pictures in docs/images, from the recorded run.

python docs/screenshots.py [FOLDER]
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Browser, Page, expect, sync_playwright
from recording import unpack

IMAGES = Path(__file__).parent / "images"
_JOB = "tiny-reasoner-1"


class Shot(NamedTuple):
    name: str
    scheme: str
    width: int
    height: int
    # scrolled to
    section: str = ""


SHOTS = (
    Shot("light", "light", 1280, 1480),
    Shot("dark", "dark", 1280, 1480),
    Shot("phone", "light", 390, 1200),
    Shot("learning", "light", 1280, 1180, "learning"),
    Shot("samples", "light", 1280, 900, "samples"),
)


def take(folder: Path) -> None:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        run = unpack(Path(home) / _JOB)
        server = subprocess.Popen(
            [sys.executable, "-m", "cli.main", "dashboard", "--run", str(run), "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"]
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        for shot in SHOTS:
            _take(browser, address, shot, folder / f"dashboard-{shot.name}.png")
        browser.close()
        server.terminate()
        server.wait()


def _take(browser: Browser, address: str, shot: Shot, file: Path) -> None:
    context = browser.new_context(
        viewport={"width": shot.width, "height": shot.height},
        color_scheme="dark" if shot.scheme == "dark" else "light",
        reduced_motion="reduce",
        timezone_id="UTC",
        locale="en-GB",
    )
    page = context.new_page()
    page.goto(f"{address}#/job/{_JOB}/{shot.section}")
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
    take(into)
