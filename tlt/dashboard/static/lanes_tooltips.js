// Tooltips of the worker lanes: duties, running answers and marks at a time.

import { clock, count, number, percent, seconds, words } from "./format.js";
import { OVER } from "./lane_model.js";
import { DUTIES } from "./names.js";

const MARKS = 4;
// pixels within which a mark is named
const NEAR = 4;

export function tooltipOfAll(view, time) {
  const { model } = view;
  if (time > view.now || !model.order.length) return null;
  if (time > view.knownUntil) return unknownText(view, time);
  if (time < model.sharesSince) return `at ${clock(time)}\nmost workers are kept since ${clock(model.sharesSince)}`;
  const counts = DUTIES.map(() => 0);
  const known = model.lanes.filter((lane) => lane.unknownUntil <= time);
  for (const lane of known) {
    const index = lane.find(time);
    if (index >= 0 && lane.duty[index] !== OVER) counts[lane.duty[index]] += 1;
  }
  const parts = DUTIES.flatMap((duty, code) =>
    counts[code] ? [`${count(counts[code])} (${percent(counts[code] / known.length)}) ${words(duty)}`] : [],
  );
  if (known.length < model.lanes.length) parts.push(`of ${count(known.length)} workers; the others are not kept`);
  return [`at ${clock(time)}`, ...parts, ...markTexts(view, model.marks, time)].join("\n");
}

export function tooltipOfLane(view, lane, time) {
  if (lane && time < lane.unknownUntil) return `${lane.name} at ${clock(time)}\nkept since ${clock(lane.unknownUntil)}`;
  const index = lane?.find(time) ?? -1;
  if (index < 0 || time > view.now) return null;
  if (time > view.knownUntil) return `${lane.name}\n${unknownText(view, time)}`;
  const duty = lane.duty[index];
  const lines = [`${lane.name}: ${duty === OVER ? "the run is over" : words(DUTIES[duty])}`];
  if (duty !== OVER) lines.push(periodText(view, lane.at[index], lane.at[index + 1]));
  if (DUTIES[duty] === "rollout") {
    const rows = lane.batch(time + 1);
    if (rows !== null) lines.push(`${number(rows, 1)} running answers`);
    const strategy = lane.marks.findLast((mark) => mark.kind === "strategy" && mark.at <= time);
    if (strategy) lines.push(`decodes with ${strategy.text}`);
  }
  const others = lane.marks.filter((mark) => mark.kind !== "strategy");
  return [...lines, ...markTexts(view, [...view.model.marks, ...others], time)].join("\n");
}

function periodText(view, begins, knownEnd) {
  const ends = knownEnd ?? view.knownUntil;
  const open = view.live ? " so far" : " until its last journal entry";
  return `${clock(begins)} to ${clock(ends)}, ${seconds(ends - begins)}${knownEnd === undefined ? open : ""}`;
}

function unknownText(view, time) {
  return `at ${clock(time)}\nno journal entry after ${clock(view.knownUntil)}`;
}

function markTexts(view, marks, time) {
  const [from, to] = view.span();
  const near = (NEAR * (to - from)) / view.box.clientWidth;
  return marks.filter((mark) => Math.abs(mark.at - time) <= near).map((mark) => `▸ ${mark.text}`).slice(0, MARKS);
}
