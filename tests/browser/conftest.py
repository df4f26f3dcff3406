"""Provide a browser in which a console error or a request to another host fails the test."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect

from docs.recording import unpack
from docs.screenshots import JOB as RECORDED
from tests.browser.chromium import NoChromium, chromium
from tests.browser.served import serve_folder
from tests.dashboard.runs import some_run, write_run
from tests.tools import skip_or_fail


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Yield a browser; its scope is the module, as its own loop excludes asynchronous tests."""
    try:
        with chromium() as browser:
            yield browser
    except NoChromium as missing:
        skip_or_fail(str(missing))


class Visit:
    """A page with its console errors and requested hosts."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        # True if console errors are expected, for example of a server that is gone
        self.lenient = False
        self.hosts: set[str] = set()
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))
        page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not self.lenient:
            self.errors.append(f"{message.type}: {message.text}")

    def _request(self, request: Request) -> None:
        self.hosts.add(urlsplit(request.url).netloc)

    def open(self, address: str) -> Page:
        self.page.goto(address)
        return self.page


def await_run(page: Page) -> None:
    expect(page.locator("#lanes")).to_be_visible(timeout=15000)
    expect(page.locator(".connection")).to_have_text("connected")


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1360, "height": 900})
    made = Visit(context.new_page())
    yield made
    context.close()
    assert made.errors == []
    assert len(made.hosts) <= 1


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(some_run(3), tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="session")
def served(finished_run: Path) -> Iterator[str]:
    with serve_folder(finished_run) as address:
        yield address


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the recorded run that the documentation shows."""
    with serve_folder(unpack(tmp_path_factory.mktemp("recorded") / RECORDED)) as address:
        yield address
