"""The page over a finished run: at any width, by keyboard, with hostile text, serverless."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Locator, Page, Route, expect

from docs.recording import unpack
from tests.browser.conftest import RECORDED, Visit
from tests.browser.served import serve_folder
from tests.dashboard.runs import some_run, write_run
from tests.simulation.world import JOB
from tlt.dataset import Prompt, Prompts, prompts_file
from tlt.store.journal import FILE_NAME

_EVIL = (
    "<script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">&lt;b&gt;"
)


# once what watches the size has drawn again
_ALL_FITS = """() => new Promise((tell) => requestAnimationFrame(() => requestAnimationFrame(
  () => tell(document.documentElement.scrollWidth <= innerWidth))))"""


def ready(page: Page) -> None:
    expect(page.locator("#lanes")).to_be_visible(timeout=15000)
    expect(page.locator(".connection")).to_have_text("connected")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits(visit: Visit, served: str, scheme: Any) -> None:
    visit.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page = visit.open(served)
    ready(page)
    for width in (390, 768, 1360, 2560):
        page.set_viewport_size({"width": width, "height": 844})
        page.wait_for_function("width => innerWidth === width", arg=width)
        assert page.evaluate(_ALL_FITS)


def test_a_run_without_an_end_is_no_live_one(visit: Visit, tmp_path: Path) -> None:
    with serve_folder(write_run(some_run(3), tmp_path, lines=20)) as address:
        page = visit.open(address)
        ready(page)
        expect(page.locator("#job .chip")).to_have_text("no end")
        expect(page.get_by_role("button", name="Live")).to_be_disabled()
        expect(page.locator("#lanes .legend")).to_contain_text("unknown")
        expect(page.locator("#tail")).to_contain_text("last heard of")
        expect(page.locator("#tail")).not_to_contain_text("should be there")
        page.locator(".lanes").focus()
        page.keyboard.press("End")
        expect(page.locator(".lanes .tip")).to_contain_text("nothing was heard after")
        page.close()


def test_it_paints_at_once_and_again(visit: Visit, served: str) -> None:
    page = visit.open(served)
    ready(page)
    page.reload()
    ready(page)
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    # milliseconds; how few is a benchmark's to say, on a machine with nothing else to do
    assert 0 < paint < 20_000


def test_lanes_answer_to_the_keyboard(visit: Visit, served: str) -> None:
    page = visit.open(served)
    ready(page)
    lanes = page.locator(".lanes")
    tip = page.locator(".lanes .tip")
    lanes.focus()
    page.keyboard.press("ArrowLeft")
    expect(tip).to_contain_text(":")
    first = tip.text_content()
    expect(lanes.get_by_role("status")).to_have_text(first or "")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert tip.text_content() != first
    note = page.locator("#lanes .hint").first
    everything = note.text_content()
    page.keyboard.press("+")
    assert note.text_content() != everything
    page.keyboard.press("0")
    assert note.text_content() == everything
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


_WEEKS = """async () => {
  const { LaneModel } = await import("/static/lane_model.js");
  const model = new LaneModel();
  for (let at = 0; at < 100_000; at += 10_000) {
    const each = (entry) => Array.from({ length: 10_000 }, (_, n) => entry(at + n));
    model.apply({
      forgotten: [],
      names: ["w0", "w1"],
      changes: each((now) => [now % 2, now, now % 4 < 2 ? "rollout" : "learn"]),
      batches: each((now) => [now % 2, now, 1]),
      marks: each((now) => [now, now === 0 ? "lost" : "strategy", 0, ""]),
    });
  }
  const [{ at, duty, rows, marks }] = model.lanes;
  return [at.length, duty.length, rows.length, at.at(-1), marks.length, marks[0].kind, model.since];
}"""


def test_lanes_keep_the_newest(visit: Visit, served: str) -> None:
    page = visit.open(served)
    changes, duties, batches, last, marks, oldest, since = page.evaluate(_WEEKS)
    assert changes == duties == batches == 20_000
    assert (last, since) == (99_998, 60_001)
    assert (marks, oldest) == (2_001, "lost")


_BARS = """async () => {
  const { Lanes } = await import("/static/lanes.js");
  const { LaneModel } = await import("/static/lane_model.js");
  const model = new LaneModel();
  model.apply({
    forgotten: [],
    names: ["w0"],
    changes: [[0, 0, "learn"], [0, 10, "rollout"], [0, 13, "learn"], [0, 20, "rollout"]],
    batches: [[0, 10.5, 8], [0, 12, 8], [0, 13.5, 4], [0, 20.5, 8]],
    marks: [],
  });
  const lanes = new Lanes(model);
  lanes.x = (time) => time;
  lanes.span = () => [0, 30];
  lanes.heard = 30;
  const bars = [];
  lanes.drawBatch({ fillRect: (x, y, width) => bars.push([x, x + width]) }, model.lanes[0], 0, 10);
  lanes.close();
  return bars;
}"""


_FLAPPING = """async () => {
  const { LaneModel } = await import("/static/lane_model.js");
  const model = new LaneModel();
  const names = Array.from({ length: 10 }, (_, n) => `w${n}`);
  const told = { names, batches: [], marks: [] };
  const changes = names.map((_, n) => [n, n === 0 ? 80 : 0, "rollout"]);
  model.apply({ ...told, changes, forgotten: [0] });
  const parts = model.shares(0, 100, 100, 10);
  const [rollout, unknown] = [parts[0], parts.at(-1)];
  const one = [model.since, model.complete, rollout[2], unknown[2], rollout[9], unknown[9]];
  model.apply({ ...told, changes: [], forgotten: [0, 1] });
  model.lanes[1].at[0] = 50;
  model.measure();
  return [one, model.since];
}"""


def test_one_that_forgot_leaves_what_all_did(visit: Visit, served: str) -> None:
    page = visit.open(served)
    assert page.evaluate(_FLAPPING) == [[0, 80, 9, 1, 10, 0], 50]


_FORGOTTEN = """async () => {
  const { Lanes } = await import("/static/lanes.js");
  const { LaneModel } = await import("/static/lane_model.js");
  const model = new LaneModel();
  const changes = [[0, 50, "rollout"], [1, 50, "rollout"]];
  model.apply({ names: ["w0", "w1"], changes, batches: [], marks: [], forgotten: [0] });
  const lanes = new Lanes(model);
  document.querySelector("main").prepend(lanes.card);
  lanes.update({ now: 100, heard: 100, live: false });
  const tips = model.order.map((lane) => lanes.tellLane(lane, 20));
  const seen = [tips, lanes.tellAll(20), lanes.unknown.hidden];
  const [left, right] = [lanes.x(10), lanes.x(40)];
  const g = lanes.body.getContext("2d");
  const { data } = g.getImageData(left, 0, right - left, 2 * lanes.rowHeight);
  const shades = (half) => {
    const part = data.slice((half * data.length) / 2, ((half + 1) * data.length) / 2);
    return new Set(new Uint32Array(part.buffer)).size;
  };
  seen.push(shades(0) > 2, shades(1) > 2);
  lanes.close();
  return seen;
}"""


def test_what_a_lane_forgot_is_hatched(visit: Visit, served: str) -> None:
    """And not what was before its worker came."""
    page = visit.open(served)
    ready(page)
    told = page.evaluate(_FORGOTTEN)
    tips = ["w0 at 0:20\nkept since 0:50", None]
    assert told == [tips, "at 0:20\nkept of most workers since 0:50", False, True, False]


def test_rows_ran_only_while_their_worker_rolled_out(visit: Visit, served: str) -> None:
    page = visit.open(served)
    bars = page.evaluate(_BARS)
    assert [since for since, _ in bars] == [10, 10.5, 12, 20]
    # none is thinner than can be seen
    assert [until for _, until in bars] == [10.75, 12, 13, 20.75]


def test_hovering_and_dragging(visit: Visit, served: str) -> None:
    page = visit.open(served)
    ready(page)
    box = page.locator(".lanes").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    expect(page.locator(".lanes .tip")).to_be_visible()
    note = page.locator("#lanes .hint").first
    before = note.text_content()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 + 150, box["y"] + 100, steps=4)
    page.mouse.up()
    assert note.text_content() != before
    page.get_by_role("button", name="All", exact=True).click()
    assert note.text_content() == before


def test_colours_are_chosen_and_kept(visit: Visit, served: str) -> None:
    page = visit.open(served)
    ready(page)
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.keyboard.press("t")
    page.keyboard.press("t")
    dark = page.evaluate(paper)
    assert dark != light
    page.reload()
    ready(page)
    assert page.evaluate(paper) == dark


def test_the_content_can_be_skipped_to(visit: Visit, served: str) -> None:
    page = visit.open(served)
    ready(page)
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    expect(page.locator("#lanes")).to_be_visible()


def test_a_link_leads_to_its_section(visit: Visit, served: str) -> None:
    page = visit.open(f"{served}#/job/{JOB}/log")
    ready(page)
    expect(page.locator("#log")).to_be_in_viewport()


def test_what_was_typed_is_not_overwritten(visit: Visit, served: str) -> None:
    page = visit.open(served)
    ready(page)
    page.route(re.compile("/spec$"), lambda route: route.fulfill(json={"yaml": "name: old"}))
    page.evaluate("import('/static/spec.js').then((it) => it.submitSpec([{ job: 'a' }]))")
    text = page.locator("#spec")
    expect(text).to_have_value("name: old")
    text.fill("name: mine")
    page.locator("#from").select_option("")
    expect(page.locator("dialog .complaint")).to_contain_text("What you have typed stays")
    expect(text).to_have_value("name: mine")


def test_a_spec_that_cannot_be_read_says_so(visit: Visit, served: str) -> None:
    page = visit.open(served)
    ready(page)
    visit.lenient = True
    page.route(re.compile("/spec$"), lambda route: route.abort())
    page.get_by_role("button", name="Spec").click()
    expect(page.locator("#job .complaint")).to_have_text("The dashboard does not answer.")


def test_what_is_not_there_is_called_so(visit: Visit, served: str) -> None:
    visit.lenient = True
    page = visit.open(f"{served}#/job/nope")
    expect(page.locator("main")).to_contain_text("There is no job 'nope'")
    expect(page.locator(".banner")).to_be_hidden()
    page.locator("main a").click()
    ready(page)
    page.evaluate("location.hash = '#/job/%E0%A4%A'")
    page.evaluate("location.hash = '#main'")
    expect(page.locator("#lanes")).to_be_visible()


_SEEN = """seen => {
  Object.defineProperty(document, "hidden", { value: !seen, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def test_nobody_is_told_what_nobody_sees(visit: Visit, served: str) -> None:
    visit.page.clock.install()
    page = visit.open(served)
    ready(page)
    page.evaluate(_SEEN, False)
    page.clock.fast_forward("00:03")
    expect(page.locator(".connection")).to_have_text("paused while nobody looks")
    page.evaluate(_SEEN, True)
    ready(page)


def test_every_section_is_reached_by_its_key(visit: Visit, served: str) -> None:
    page = visit.open(served)
    ready(page)
    for number in range(1, page.locator(".jump a").count() + 1):
        address = page.locator(".jump a").nth(number - 1).get_attribute("href") or ""
        page.keyboard.press(str(number))
        expect(page).to_have_url(re.compile(f"{re.escape(address)}$"))
        expect(page.locator(f"#{address.rpartition('/')[2]}")).to_be_in_viewport()


def test_it_tells_its_attempts(visit: Visit, served: str) -> None:
    page = visit.open(f"{served}#/job/{JOB}/attempts")
    ready(page)
    expect(page.locator("#attempts")).to_contain_text("the job was started")
    expect(page.locator("#attempts")).to_contain_text("the job ended")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = write_run(some_run(3), tmp_path_factory.mktemp("hostile"))
    lines: list[bytes] = []
    for line in (folder / FILE_NAME).read_bytes().splitlines():
        entry = msgspec.json.decode(line)
        if "text" in entry["event"]:
            entry["event"]["text"] = _EVIL
        if "reason" in entry["event"]:
            entry["event"]["reason"] = _EVIL
        lines.append(msgspec.json.encode(entry))
    (folder / FILE_NAME).write_bytes(b"\n".join([*lines, b""]))
    row = Prompt(tokens=(1,), row={"prompt": _EVIL}, answer=_EVIL)
    Prompts.write(prompts_file(folder, "train"), [row] * 8)
    with serve_folder(folder) as address:
        yield address


def test_prompts_and_answers_are_text_whatever_they_hold(visit: Visit, hostile: str) -> None:
    page = visit.open(f"{hostile}#/job/{JOB}/samples")
    ready(page)
    page.locator("#round").select_option("train 0")
    expect(page.locator(".answer pre").first).to_contain_text("<script>")
    expect(page.locator(".question")).to_contain_text("onerror")
    assert page.locator("main img, main script").count() == 0
    assert page.title() != "evil"


def point(page: Page, over: Locator, share: float) -> None:
    over.evaluate("over => over.scrollIntoView({ block: 'center', behavior: 'instant' })")
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2, steps=3)


def zoom(page: Page, over: Locator) -> None:
    point(page, over, 0.2)
    page.mouse.down()
    point(page, over, 0.6)
    page.mouse.up()


_AT_END = "log => log.scrollTop + log.clientHeight >= log.scrollHeight - 1"


_FEW_ROWS_FIT = """() => {
    const sheet = new CSSStyleSheet();
    sheet.replaceSync("#drafter .scroll { max-height: 6rem }");
    document.adoptedStyleSheets = [sheet];
}"""


def test_who_reads_on_is_not_disturbed_by_news(visit: Visit, tmp_path: Path) -> None:
    journal = unpack(tmp_path / RECORDED) / FILE_NAME
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:1500]))
    with serve_folder(journal.parent) as address, journal.open("ab", buffering=0) as file:
        page = visit.open(address)
        page.evaluate(_FEW_ROWS_FIT)
        ready(page)
        decisions = page.get_by_role("region", name="Decisions, newest first")
        expect(decisions).to_have_attribute("tabindex", "0")
        expect(page.locator("#times .scroll").first).not_to_have_attribute("tabindex", "0")
        reward = page.locator("#learning .chart").first
        reward.locator("summary").click()
        expect(reward.locator(".numbers tbody tr")).to_have_count(1)
        loss = page.locator("#drafter .u-over").first
        zoom(page, loss)
        point(page, loss, 0.95)
        pointed = page.locator("#drafter .u-value").first
        last = pointed.inner_text()
        decisions.evaluate("box => { box.focus(); box.scrollTop = 60; }")
        log = page.locator("#log pre")
        assert log.evaluate(_AT_END)
        file.write(b"".join(lines[1500:3000]))
        expect(log).to_contain_text("step 2: reward")
        assert log.evaluate(_AT_END)
        log.evaluate("log => { log.scrollTop = 100; }")
        file.write(b"".join(lines[3000:]))
        expect(page.locator("#job .chip")).to_have_text("done")
        expect(decisions.locator("tbody tr")).to_have_count(18)
        expect(reward.locator(".numbers tbody tr")).to_have_count(9)
        assert decisions.evaluate("box => box === document.activeElement && box.scrollTop >= 60")
        point(page, loss, 0.95)
        expect(pointed).to_have_text(last)
        assert log.evaluate("log => log.scrollTop") == 100
        page.get_by_role("button", name="Follow the newest").click()
        expect(page.get_by_role("button", name="Follow the newest")).to_be_hidden()
        page.close()


def test_right_or_wrong_answers_have_an_accuracy(visit: Visit, recorded: str) -> None:
    page = visit.open(f"{recorded}#/job/{RECORDED}/learning")
    ready(page)
    evaluations = page.locator("#learning table").last
    expect(evaluations.locator("th").nth(2)).to_have_text("accuracy")
    expect(evaluations.locator("tbody td").nth(2)).to_have_text(re.compile(r"^\d+\.\d %$"))


def test_each_drafter_says_how_far_it_guessed_right(visit: Visit, recorded: str) -> None:
    page = visit.open(f"{recorded}#/job/{RECORDED}/speculation")
    ready(page)
    reached = page.locator('#speculation h3:has-text("by drafter") + div table')
    expect(reached.locator("thead")).to_contain_text("rounds")
    newest = reached.locator("tbody tr").first.locator("th, td")
    expect(newest.first).to_have_text(re.compile(r"^drafter \d+$"))
    expect(newest.nth(2)).to_have_text(re.compile(r"%$"))


def test_every_round_shows_its_own_answers(visit: Visit, recorded: str) -> None:
    page = visit.open(f"{recorded}#/job/{RECORDED}/samples")
    samples = page.locator("#samples")
    expect(samples.locator(".answer").first).to_be_visible(timeout=15000)
    rounds = page.locator("#round option").evaluate_all("all => all.map(each => each.value)")
    for each in rounds:
        _, step = each.split()
        page.locator("#round").select_option(each)
        expect(samples.locator("caption")).to_contain_text(f"step {step}:")
        expect(samples.locator(".answer").first).to_be_visible()
        expect(samples.locator(".complaint").first).to_be_empty()


def test_the_group_that_was_chosen_last_is_shown(visit: Visit, recorded: str) -> None:
    page = visit.open(f"{recorded}#/job/{RECORDED}/samples")
    groups = page.locator("#samples .groups button")
    expect(page.locator("#samples caption")).to_contain_text("step 7:", timeout=15000)
    expect(page.locator("#samples .answer").first).to_be_visible()
    late: list[Route] = []
    page.route(re.compile("/samples/7/train/"), lambda route: late.append(route), times=1)
    groups.nth(1).click()
    groups.nth(2).click()
    expect(page.locator("#samples [aria-current]")).to_have_text(groups.nth(2).inner_text())
    name = groups.nth(2).inner_text().removeprefix("prompt ")
    path = f"/api/jobs/{RECORDED}/samples/7/train/{name}"
    asked = page.evaluate("path => fetch(path).then((told) => told.json())", path)["question"]
    expect(page.locator("#samples .question")).to_contain_text(asked)
    with page.expect_response(re.compile("/samples/7/train/")):
        late[0].continue_()
    expect(page.locator("#samples .question")).to_contain_text(asked)
