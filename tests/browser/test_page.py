"""The page of a finished run handles layout, keyboard, themes, dialogs and updates."""

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from docs.recording import unpack
from tests.browser.conftest import RECORDED, Visit, await_run
from tests.browser.journal_growth import around_an_inner_loss, growth
from tests.browser.served import serve_folder
from tests.dashboard.runs import some_run, write_run
from tests.simulation.world import JOB
from tlt.store.journal import FILE_NAME

pytestmark = pytest.mark.live

# evaluated after the resize observers have drawn
_ALL_FITS = """() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(
  () => resolve(document.documentElement.scrollWidth <= innerWidth))))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_any_width(visit: Visit, served: str, scheme: Any) -> None:
    visit.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page = visit.open(served)
    await_run(page)
    for width in (390, 768, 1360, 2560):
        page.set_viewport_size({"width": width, "height": 844})
        page.wait_for_function("width => innerWidth === width", arg=width)
        assert page.evaluate(_ALL_FITS)


def test_run_without_an_end_is_not_live(visit: Visit, tmp_path: Path) -> None:
    with serve_folder(write_run(some_run(3), tmp_path, lines=8)) as address:
        page = visit.open(address)
        await_run(page)
        expect(page.locator("#job .chip")).to_have_text("no end")
        expect(page.get_by_role("button", name="Live")).to_be_disabled()
        expect(page.locator("#lanes .legend")).to_contain_text("unknown")
        expect(page.locator("#tail")).to_contain_text("at the last journal entry")
        expect(page.locator("#tail")).not_to_contain_text("Forecast")
        page.locator(".lanes").focus()
        page.keyboard.press("End")
        expect(page.locator(".lanes .tooltip")).to_contain_text("no journal entry after")
        page.close()


def test_paints_soon_and_after_a_reload(visit: Visit, served: str) -> None:
    page = visit.open(served)
    await_run(page)
    page.reload()
    await_run(page)
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    # milliseconds; a benchmark on an idle machine measures this precisely
    assert 0 < paint < 20_000


def test_theme_is_kept_over_a_reload(visit: Visit, served: str) -> None:
    page = visit.open(served)
    await_run(page)
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.keyboard.press("t")
    page.keyboard.press("t")
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    await_run(page)
    assert page.evaluate(background) == dark


def test_skip_link_focuses_the_content(visit: Visit, served: str) -> None:
    page = visit.open(served)
    await_run(page)
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    expect(page.locator("#lanes")).to_be_visible()


def test_link_scrolls_to_its_section(visit: Visit, served: str) -> None:
    page = visit.open(f"{served}#/job/{JOB}/log")
    await_run(page)
    expect(page.locator("#log")).to_be_in_viewport()


def test_does_not_overwrite_a_typed_spec(visit: Visit, served: str) -> None:
    page = visit.open(served)
    await_run(page)
    page.route(re.compile("/spec$"), lambda route: route.fulfill(json={"yaml": "name: old"}))
    page.evaluate("import('/static/spec_dialogs.js').then((it) => it.submitSpec([{ job: 'a' }]))")
    text = page.locator("#spec")
    expect(text).to_have_value("name: old")
    text.fill("name: mine")
    page.locator("#template").select_option("")
    expect(page.locator("dialog .error")).to_contain_text("Your text is kept")
    expect(text).to_have_value("name: mine")


def test_shows_why_a_spec_cannot_be_read(visit: Visit, served: str) -> None:
    page = visit.open(served)
    await_run(page)
    visit.lenient = True
    page.route(re.compile("/spec$"), lambda route: route.abort())
    page.get_by_role("button", name="Spec").click()
    expect(page.locator("#job .error")).to_have_text("The dashboard does not answer.")


def test_says_that_a_job_does_not_exist(visit: Visit, served: str) -> None:
    visit.lenient = True
    page = visit.open(f"{served}#/job/nope")
    expect(page.locator("main")).to_contain_text("There is no job 'nope'")
    expect(page.locator(".banner")).to_be_hidden()
    page.locator("main a").click()
    await_run(page)
    page.evaluate("location.hash = '#/job/%E0%A4%A'")
    page.evaluate("location.hash = '#main'")
    expect(page.locator("#lanes")).to_be_visible()


_SET_VISIBLE = """visible => {
  Object.defineProperty(document, "hidden", { value: !visible, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_hidden_page_pauses_its_event_stream(visit: Visit, served: str) -> None:
    visit.page.clock.install()
    page = visit.open(served)
    await_run(page)
    page.evaluate(_SET_VISIBLE, False)
    page.clock.fast_forward("00:03")
    expect(page.locator(".connection")).to_have_text("paused while hidden")
    page.evaluate(_SET_VISIBLE, True)
    await_run(page)


def test_number_keys_scroll_to_sections(visit: Visit, served: str) -> None:
    page = visit.open(served)
    await_run(page)
    for number in range(1, page.locator(".section-links a").count() + 1):
        address = page.locator(".section-links a").nth(number - 1).get_attribute("href") or ""
        page.keyboard.press(str(number))
        expect(page).to_have_url(re.compile(f"{re.escape(address)}$"))
        expect(page.locator(f"#{address.rpartition('/')[2]}")).to_be_in_viewport()


def test_shows_attempts(visit: Visit, served: str) -> None:
    page = visit.open(f"{served}#/job/{JOB}/attempts")
    await_run(page)
    expect(page.locator("#attempts")).to_contain_text("the job was started")
    expect(page.locator("#attempts")).to_contain_text("the job ended")


def point(page: Page, over: Locator, share: float) -> None:
    over.evaluate("over => over.scrollIntoView({ block: 'center', behavior: 'instant' })")
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2, steps=3)


def zoom(page: Page, over: Locator, shares: tuple[float, float]) -> None:
    point(page, over, shares[0])
    page.mouse.down()
    point(page, over, shares[1])
    page.mouse.up()


_AT_END = "log => log.scrollTop + log.clientHeight >= log.scrollHeight - 1"


_FEW_ROWS_FIT = """() => {
    const sheet = new CSSStyleSheet();
    sheet.replaceSync("#drafter .scroll { max-height: 3rem } #log pre { max-height: 6rem }");
    document.adoptedStyleSheets = [sheet];
}"""


def test_updates_keep_scroll_focus_and_zoom(visit: Visit, tmp_path: Path) -> None:
    folder = unpack(tmp_path / RECORDED)
    journal = folder / FILE_NAME
    lines = journal.read_bytes().splitlines(keepends=True)
    shown = list(growth(folder))
    # enough for a decision to scroll away and for a loss to zoom to; then a further step
    early = next(s for s in shown if s.steps and s.decisions >= 5 and len(s.losses) >= 3)
    later = next(s for s in shown if s.steps > early.steps and s.log_lines >= 15)
    journal.write_bytes(b"".join(lines[: early.entries]))
    with serve_folder(journal.parent) as address, journal.open("ab", buffering=0) as file:
        page = visit.open(address)
        page.evaluate(_FEW_ROWS_FIT)
        await_run(page)
        decisions = page.get_by_role("region", name="Decisions, newest first")
        expect(decisions).to_have_attribute("tabindex", "0")
        expect(page.locator("#times .scroll").first).not_to_have_attribute("tabindex", "0")
        reward = page.locator("#learning .chart").first
        reward.locator("summary").click()
        expect(reward.locator(".numbers tbody tr")).to_have_count(early.rewards)
        loss = page.locator("#drafter .u-over").first
        zoom(page, loss, around_an_inner_loss(early.losses))
        point(page, loss, 0.95)
        pointed = page.locator("#drafter .u-value").first
        last = pointed.inner_text()
        decisions.evaluate("box => { box.focus(); box.scrollTop = 60; }")
        log = page.locator("#log pre")
        assert log.evaluate(_AT_END)
        file.write(b"".join(lines[early.entries : later.entries]))
        expect(log).to_contain_text(f"step {later.steps - 1}: reward")
        assert log.evaluate(_AT_END)
        log.evaluate("log => { log.scrollTop = 100; }")
        file.write(b"".join(lines[later.entries :]))
        expect(page.locator("#job .chip")).to_have_text("done")
        expect(decisions.locator("tbody tr")).to_have_count(shown[-1].decisions)
        expect(reward.locator(".numbers tbody tr")).to_have_count(shown[-1].rewards)
        assert decisions.evaluate("box => box === document.activeElement && box.scrollTop >= 60")
        point(page, loss, 0.95)
        expect(pointed).to_have_text(last)
        assert log.evaluate("log => log.scrollTop") == 100
        page.get_by_role("button", name="Follow the newest").click()
        expect(page.get_by_role("button", name="Follow the newest")).to_be_hidden()
        page.close()


def test_binary_rewards_are_shown_as_an_accuracy(visit: Visit, recorded: str) -> None:
    page = visit.open(f"{recorded}#/job/{RECORDED}/learning")
    await_run(page)
    evaluations = page.locator("#learning table").last
    expect(evaluations.locator("th").nth(3)).to_have_text("accuracy")
    expect(evaluations.locator("tbody td").nth(3)).to_have_text(re.compile(r"^\d+\.\d %$"))


def test_shows_accepted_tokens_by_drafter(visit: Visit, recorded: str) -> None:
    page = visit.open(f"{recorded}#/job/{RECORDED}/speculation")
    await_run(page)
    rows = page.locator('#speculation h3:has-text("by drafter") + div table')
    expect(rows.locator("thead")).to_contain_text("verify steps")
    newest = rows.locator("tbody tr").first.locator("th, td")
    expect(newest.first).to_have_text(re.compile(r"^drafter \d+$"))
    expect(newest.nth(2)).to_have_text(re.compile(r"%$"))
