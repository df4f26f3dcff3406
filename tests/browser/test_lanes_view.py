"""The worker lanes follow keyboard and pointer and show where they are truncated."""

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Visit, await_run

pytestmark = pytest.mark.live


def test_keyboard_selects_and_zooms(visit: Visit, served: str) -> None:
    page = visit.open(served)
    await_run(page)
    lanes = page.locator(".lanes")
    tooltip = page.locator(".lanes .tooltip")
    lanes.focus()
    page.keyboard.press("ArrowLeft")
    expect(tooltip).to_contain_text(":")
    first = tooltip.text_content()
    expect(lanes.get_by_role("status")).to_have_text(first or "")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert tooltip.text_content() != first
    note = page.locator("#lanes .hint").first
    everything = note.text_content()
    page.keyboard.press("+")
    assert note.text_content() != everything
    page.keyboard.press("0")
    assert note.text_content() == everything
    page.keyboard.press("Escape")
    expect(tooltip).to_be_hidden()


_MANY_ENTRIES = """async () => {
  const { LaneModel } = await import("/static/lane_model.js");
  const model = new LaneModel();
  for (let at = 0; at < 100_000; at += 10_000) {
    const each = (entry) => Array.from({ length: 10_000 }, (_, n) => entry(at + n));
    model.apply({
      forgotten: [],
      names: ["w0", "w1"],
      changes: each((now) => [now % 2, now, now % 4 < 2 ? "rollout" : "policy_update"]),
      batches: each((now) => [now % 2, now, 1]),
      marks: each((now) => [now, now === 0 ? "lost" : "strategy", 0, ""]),
    });
  }
  const [{ at, duty, rows, marks }] = model.lanes;
  const counts = [at.length, duty.length, rows.length];
  return [...counts, at.at(-1), marks.length, marks[0].kind, model.sharesSince];
}"""


def test_model_keeps_the_newest_entries(visit: Visit, served: str) -> None:
    page = visit.open(served)
    changes, duties, batches, last, marks, oldest, since = page.evaluate(_MANY_ENTRIES)
    assert changes == duties == batches == 20_000
    assert (last, since) == (99_998, 60_001)
    assert (marks, oldest) == (2_001, "lost")


_TRUNCATED_LANE = """async () => {
  const { LaneModel } = await import("/static/lane_model.js");
  const model = new LaneModel();
  const names = Array.from({ length: 10 }, (_, n) => `w${n}`);
  const update = { names, batches: [], marks: [] };
  const changes = names.map((_, n) => [n, n === 0 ? 80 : 0, "rollout"]);
  model.apply({ ...update, changes, forgotten: [0] });
  const parts = model.shares(0, 100, 100, 10);
  const [rollout, unknown] = [parts[0], parts.at(-1)];
  const since = [model.sharesSince, model.completeSince];
  const one = [...since, rollout[2], unknown[2], rollout[9], unknown[9]];
  model.apply({ ...update, changes: [], forgotten: [0, 1] });
  model.lanes[1].at[0] = 50;
  model.updateKnown();
  return [one, model.sharesSince];
}"""


def test_one_truncated_lane_leaves_the_shares_of_all(visit: Visit, served: str) -> None:
    page = visit.open(served)
    assert page.evaluate(_TRUNCATED_LANE) == [[0, 80, 9, 1, 10, 0], 50]


_TRUNCATED = """async () => {
  const { LanesView } = await import("/static/lanes_view.js");
  const { LaneModel } = await import("/static/lane_model.js");
  const model = new LaneModel();
  const changes = [[0, 50, "rollout"], [1, 50, "rollout"]];
  model.apply({ names: ["w0", "w1"], changes, batches: [], marks: [], forgotten: [0] });
  const view = new LanesView(model);
  document.querySelector("main").prepend(view.card);
  view.update({ now: 100, knownUntil: 100, live: false });
  const { tooltipOfAll, tooltipOfLane } = await import("/static/lanes_tooltips.js");
  const tooltips = model.order.map((lane) => tooltipOfLane(view, lane, 20));
  const seen = [tooltips, tooltipOfAll(view, 20), view.unknownEntry.hidden];
  const [left, right] = [view.x(10), view.x(40)];
  const g = view.body.getContext("2d");
  const { data } = g.getImageData(left, 0, right - left, 2 * view.rowHeight);
  const shades = (half) => {
    const part = data.slice((half * data.length) / 2, ((half + 1) * data.length) / 2);
    return new Set(new Uint32Array(part.buffer)).size;
  };
  seen.push(shades(0) > 2, shades(1) > 2);
  view.close();
  return seen;
}"""


def test_hatches_the_dropped_part_of_a_lane(visit: Visit, served: str) -> None:
    """The time before a worker came stays blank."""
    page = visit.open(served)
    await_run(page)
    seen = page.evaluate(_TRUNCATED)
    tooltips = ["w0 at 0:20\nkept since 0:50", None]
    assert seen == [tooltips, "at 0:20\nmost workers are kept since 0:50", False, True, False]


_BARS = """async () => {
  const { LanesView } = await import("/static/lanes_view.js");
  const { LaneModel } = await import("/static/lane_model.js");
  const model = new LaneModel();
  model.apply({
    forgotten: [],
    names: ["w0"],
    changes: [[0, 0, "idle"], [0, 10, "rollout"], [0, 13, "idle"], [0, 20, "rollout"]],
    batches: [[0, 10.5, 8], [0, 12, 8], [0, 13.5, 4], [0, 20.5, 8]],
    marks: [],
  });
  const view = new LanesView(model);
  view.x = (time) => time;
  view.span = () => [0, 30];
  view.knownUntil = 30;
  const bars = [];
  const g = { fillRect: (x, y, width) => bars.push([x, x + width]) };
  view.drawing.drawBatchSizes(g, model.lanes[0], 0, 10);
  view.close();
  return bars;
}"""


def test_draws_batch_sizes_only_within_rollouts(visit: Visit, served: str) -> None:
    page = visit.open(served)
    bars = page.evaluate(_BARS)
    assert [since for since, _ in bars] == [10, 10.5, 12, 20]
    # bars have a minimum width
    assert [until for _, until in bars] == [10.75, 12, 13, 20.75]


def test_hovering_shows_a_tooltip_and_dragging_zooms(visit: Visit, served: str) -> None:
    page = visit.open(served)
    await_run(page)
    box = page.locator(".lanes").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 100)
    expect(page.locator(".lanes .tooltip")).to_be_visible()
    note = page.locator("#lanes .hint").first
    before = note.text_content()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 + 150, box["y"] + 100, steps=4)
    page.mouse.up()
    assert note.text_content() != before
    page.get_by_role("button", name="All", exact=True).click()
    assert note.text_content() == before
