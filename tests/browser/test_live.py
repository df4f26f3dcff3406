"""The page of a real job follows it from submission over a worker's death to cancellation."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import yaml
from playwright.sync_api import Page, expect

from cli.dashboard import RunningDashboard
from tests.browser.conftest import Visit
from tests.e2e.live import Live, kill, wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

_PIXELS = """([canvas, name]) => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(--${name})`;
  const [r, g, b] = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
  probe.remove();
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let i = 0; i < data.length; i += 4) {
    found += data[i] === r && data[i + 1] === g && data[i + 2] === b;
  }
  return found;
}"""


def dashboard(live: Live) -> RunningDashboard:
    file = live.home / "tlt" / "sessions" / "default" / "dashboard.json"
    return msgspec.json.decode(file.read_bytes(), type=RunningDashboard)


@pytest.fixture
def spec(raw_spec: dict[str, Any]) -> str:
    """Return the spec of a job that runs until it is cancelled."""
    return yaml.safe_dump(
        {
            **raw_spec,
            "name": "seen",
            "algorithm": {**raw_spec["algorithm"], "steps": 1000, "eval_every": 0},
            "rollout": {"max_new_tokens": 200, "slots": 4},
            "speculation": {"mode": "adaptive"},
        }
    )


def pixels(page: Page, colour: str) -> int:
    canvas = page.locator(".lanes .rows canvas").element_handle()
    return page.evaluate(_PIXELS, [canvas, colour])


def newest_change(page: Page) -> str:
    """Return the time of the first worker's last change of duty, which only updates advance."""
    page.locator(".lanes").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    tooltip = page.locator(".lanes .tooltip").inner_text()
    found = re.search(r"([\d:]+) to ", tooltip)
    assert found is not None, tooltip
    return found[1]


def keep_screenshot(page: Page, name: str) -> None:
    """Keep a screenshot if TLT_SCREENSHOTS names a folder."""
    if kept := os.environ.get("TLT_SCREENSHOTS"):
        page.screenshot(path=Path(kept) / f"{name}.png", full_page=True)


def test_follows_a_job_from_submission_to_cancellation(visit: Visit, live: Live, spec: str) -> None:
    started = dashboard(live)
    page = visit.open(started.address)
    worker = page.locator("#streams tr", has_text="w1")
    expect(worker).to_contain_text(re.compile(r"\d [MG]iB"), timeout=20000)

    page.get_by_role("button", name="Submit a job").click()
    page.locator("#spec").fill(spec)
    page.locator("dialog button.primary").click()
    expect(page.locator("#lanes")).to_be_visible(timeout=30000)
    job = page.url.rpartition("/")[2]

    see_it_work(page)
    keep_screenshot(page, "live")

    visit.lenient = True
    kill(started.pid)
    expect(page.locator(".banner")).to_contain_text("does not answer", timeout=10000)
    step = live.fold(job).step
    wait_until(lambda: live.fold(job).step > step, "the job to go on without it")
    with dashboard_again(live, started):
        expect(page.locator(".connection")).to_have_text("live", timeout=15000)
        expect(page.locator(".banner")).to_be_hidden()
        visit.lenient = False

        live.await_workers(2)
        kill(live.workers()["w1"].rank_pids[0])
        expect(page.locator("#log pre")).to_contain_text("w1 lost", timeout=20000)
        wait_until(lambda: pixels(page, "away") > 0, "the killed worker to be marked", 20)
        expect(page.locator("#warnings")).to_contain_text("lost")
        # in a policy update, the other worker's incarnation ends too
        ended = re.compile(r"1 incarnation of a worker|2 incarnations of workers")
        expect(page.locator("#attempts")).to_contain_text(ended)
        keep_screenshot(page, "killed")

        page.get_by_role("button", name="Cancel the job").first.click()
        page.locator("dialog button.danger").click()
        expect(page.locator("#job .chip")).to_have_text("cancelled", timeout=20000)
        assert live.job(job)["status"] == "cancelled"

        page.locator(".breadcrumb a").click()
        expect(page.locator("main")).to_contain_text("cancelled")
        row = page.locator("tr", has_text=job).locator("td")
        expect(row.nth(5)).to_have_text("1")  # attempts
        # workers lost
        expect(row.nth(6)).to_have_text(re.compile("^(1|2)$"))
        keep_screenshot(page, "session")
        page.close()


def see_it_work(page: Page) -> None:
    wait_until(lambda: pixels(page, "rollout") > 0, "a worker to roll out", 30)
    before = newest_change(page)
    wait_until(lambda: newest_change(page) != before, "the lanes to move", 30)
    wait_until(lambda: pixels(page, "policy_update") > 0, "a worker to learn", 30)
    expect(page.locator("#tail .uplot").first).to_be_visible()
    expect(page.locator("#learning .uplot").first).to_be_visible(timeout=30000)
    page.locator("#learning .numbers summary").first.click()
    steps = page.locator("#learning .numbers tbody tr")
    expect(steps.first).to_be_visible()
    few = steps.count()
    wait_until(lambda: steps.count() > few, "the charts to grow", 40)
    expect(page.locator("#log pre")).to_contain_text("step 1: reward", timeout=40000)
    page.locator("#samples").scroll_into_view_if_needed()
    expect(page.locator("#samples .answer").first).to_be_visible(timeout=10000)


@contextlib.contextmanager
def dashboard_again(live: Live, was: RunningDashboard) -> Iterator[None]:
    """Start the dashboard again with the same port and token."""
    with live.start("dashboard", "--port", str(urlsplit(was.address).port)) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().split()[-1] == was.address
            yield
        finally:
            process.terminate()
