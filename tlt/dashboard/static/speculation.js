// Speculation: what is guessed with, how much of it is accepted, and what that saves.

import { Chart } from "./charts.js";
import { card, h, renew, say, table } from "./dom.js";
import { count, number, percent, saving, seconds } from "./format.js";

// columns of the table
const GUESSES = 10;

export class SpeculationCard {
  constructor() {
    this.positions = new Chart("Rounds that accepted so many guesses or more (%)", {
      x: { name: "guesses", format: count, whole: true },
      format: (value) => `${Math.round(value)} %`,
      series: [{ name: "rounds", colour: "series-1", bars: true, width: 0 }],
      top: 100,
      empty: "Nothing was guessed yet.",
    });
    this.saved = new Chart("Saved of each step's wait (s; the band holds 95 %)", {
      x: { name: "step", format: count, whole: true },
      format: (value) => number(value, 1),
      series: [
        { name: "at most", colour: "series-1", width: 0.5 },
        { name: "at least", colour: "series-1", width: 0.5 },
        { name: "saved", colour: "series-1", points: true },
      ],
      band: [1, 2],
      empty: "Known after a control run.",
    });
    this.sum = h("p");
    this.why = h("p", { class: "hint" });
    this.accepted = h("div");
    this.reached = h("div");
    this.ways = h("div");
    this.element = card(
      "Speculation",
      { id: "speculation", wide: true },
      h("div", { class: "stack" }, this.sum, this.why),
      h("div", { class: "charts" }, this.positions.element, this.saved.element),
      h("h3", {}, "Tokens a round and row, the policy's own included"),
      this.accepted,
      h("h3", {}, "Rounds that accepted so many guesses or more, by drafter"),
      this.reached,
      h("h3", {}, "Ways of decoding in the last half minute of it"),
      this.ways,
    );
  }

  close() {
    this.positions.close();
    this.saved.close();
  }

  update(speculation, times) {
    if (speculation === null) return;
    say(this.sum, sum(speculation));
    say(this.why, speculation.why);
    const shares = speculation.positions.slice(0, 24);
    this.positions.set([shares.map((_, index) => index + 1), shares.map((share) => 100 * share)]);
    const steps = (times?.steps ?? []).filter((step) => step.critical);
    this.saved.set([
      steps.map((step) => step.step),
      steps.map((step) => step.critical.high),
      steps.map((step) => step.critical.low),
      steps.map((step) => step.critical.seconds),
    ]);
    renew(this.accepted, accepted(speculation.acceptance));
    renew(this.reached, reached(speculation.by_drafter));
    renew(this.ways, ways(speculation.strategies));
  }
}

function sum({ mode, saved, gave_up: gaveUp }) {
  if (mode === "off") return "This job decodes without speculation.";
  if (!saved) return "Not compared with decoding without it yet: no control run is over.";
  const cost = `${count(saved.runs)} control runs, ${seconds(saved.control_seconds)} together, cost ${seconds(saved.control_cost)}`;
  return `Saved ${saving(saved.total)} of all ranks' time; ${cost}.${gaveUp ? " It cost more than it saved, and was given up." : ""}`;
}

function accepted(parts) {
  const buckets = [...new Set(parts.map((part) => part.bucket))].sort((a, b) => a - b);
  const rows = new Map();
  for (const part of parts) {
    const name = part.by === "ngram" ? "n-grams" : `drafter ${part.drafter}`;
    rows.set(name, [...(rows.get(name) ?? []), part]);
  }
  const mean = (some) => {
    const total = some.reduce((all, part) => all + part.rows, 0);
    return total ? number(some.reduce((all, part) => all + part.tokens, 0) / total, 2) : "";
  };
  return table(
    [
      { name: "guessed by", left: true },
      ...buckets.map((bucket) => ({ name: bucket === 1 ? "1 row" : `≤ ${bucket} rows` })),
      { name: "all" },
    ],
    [...rows]
      .reverse()
      .map(([name, some]) => [name, ...buckets.map((bucket) => mean(some.filter((part) => part.bucket === bucket))), mean(some)]),
    { caption: "newest drafter first", empty: "Nothing was guessed yet." },
  );
}

function reached(parts) {
  const deepest = Math.min(GUESSES, Math.max(0, ...parts.map((part) => part.shares.length)));
  const guesses = Array.from({ length: deepest }, (_, index) => index);
  return table(
    [{ name: "guessed by", left: true }, { name: "rounds" }, ...guesses.map((index) => ({ name: count(index + 1) }))],
    parts
      .toReversed()
      .map(({ drafter, rounds, shares }) => [
        drafter === null ? "n-grams, or not told" : `drafter ${drafter}`,
        count(rounds),
        ...guesses.map((index) => (index < shares.length ? percent(shares[index]) : "")),
      ]),
    { caption: "newest drafter first", empty: "Nothing was guessed yet." },
  );
}

function ways(all) {
  const rounds = new Map();
  for (const way of all) rounds.set(way.bucket, (rounds.get(way.bucket) ?? 0) + way.rounds);
  return table(
    [
      { name: "rows" },
      { name: "way", left: true },
      { name: "rounds" },
      { name: "tried" },
      { name: "predicted tokens/s of a rank" },
      { name: "seen tokens/s of a rank" },
    ],
    all.map((way) => [
      way.bucket === 1 ? "1" : `≤ ${way.bucket}`,
      way.control ? `${way.name} (control)` : way.drafter === null ? way.name : `${way.name}, drafter ${way.drafter}`,
      `${count(way.rounds)} (${percent(way.rounds / rounds.get(way.bucket))})`,
      count(way.tried),
      way.control ? "–" : number(way.predicted, 0),
      number(way.seen, 0),
    ]),
    { empty: "No rank has said yet how it decodes." },
  );
}
