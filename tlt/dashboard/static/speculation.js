// Speculation: accept lengths, the strategies in use, and what they save.

import { Chart } from "./charts.js";
import { Table, card, h, left, setText } from "./dom.js";
import { count, number, percent, saving, seconds } from "./format.js";

// positions that the table shows
const POSITIONS = 10;
const CHART_POSITIONS = 24;

export class SpeculationCard {
  constructor() {
    this.positions = new Chart("Verify steps that accepted at least N tokens (%)", {
      x: { name: "accepted tokens", format: count, whole: true },
      format: (value) => `${Math.round(value)} %`,
      series: [{ name: "verify steps", colour: "series-1", bars: true, width: 0 }],
      top: 100,
      empty: "Nothing was proposed yet.",
    });
    this.saved = new Chart("Saved of each step's wait (s; the band is the 95 % interval)", {
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
    this.summary = h("p");
    this.why = h("p", { class: "hint" });
    const options = { caption: "newest drafter first", empty: "Nothing was proposed yet." };
    this.acceptance = new Table([], options);
    this.byDrafter = new Table([], options);
    this.strategies = new Table(
      ["running answers", left("strategy"), "decode steps", "of these explored", "predicted tokens/s of a rank", "measured tokens/s of a rank"],
      { empty: "No rank has reported its decode steps yet." },
    );
    this.element = card(
      "Speculation",
      { id: "speculation", wide: true },
      h("div", { class: "stack" }, this.summary, this.why),
      h("div", { class: "charts" }, this.positions.element, this.saved.element),
      h("h3", {}, "Accept length (tokens per verify step and answer, the bonus token included)"),
      this.acceptance.element,
      h("h3", {}, "Verify steps that accepted at least N tokens, by drafter"),
      this.byDrafter.element,
      h("h3", {}, "Strategies in the last 30 seconds of decoding"),
      this.strategies.element,
    );
  }

  close() {
    this.positions.close();
    this.saved.close();
  }

  update(speculation, times) {
    if (speculation === null) return;
    setText(this.summary, summary(speculation));
    setText(this.why, speculation.why);
    const shares = speculation.positions.slice(0, CHART_POSITIONS);
    this.positions.set([shares.map((_, index) => index + 1), shares.map((share) => 100 * share)]);
    const steps = (times?.steps ?? []).filter((step) => step.wait_savings);
    this.saved.set([
      steps.map((step) => step.step),
      steps.map((step) => step.wait_savings.high),
      steps.map((step) => step.wait_savings.low),
      steps.map((step) => step.wait_savings.seconds),
    ]);
    this.updateAcceptance(speculation.acceptance);
    this.updateByDrafter(speculation.by_drafter);
    this.updateStrategies(speculation.strategies);
  }

  updateAcceptance(parts) {
    const buckets = [...new Set(parts.map((part) => part.bucket))].sort((a, b) => a - b);
    const byName = Map.groupBy(parts, (part) => (part.proposer === "ngram" ? "n-grams" : `drafter ${part.drafter}`));
    this.acceptance.columns = [left("proposed by"), ...buckets.map((bucket) => (bucket === 1 ? "1 answer" : `≤ ${bucket} answers`)), "all"];
    this.acceptance.update(
      [...byName]
        .reverse()
        .map(([name, own]) => [name, ...buckets.map((bucket) => acceptLength(own.filter((part) => part.bucket === bucket))), acceptLength(own)]),
    );
  }

  updateByDrafter(rows) {
    const deepest = Math.min(POSITIONS, Math.max(0, ...rows.map((row) => row.shares.length)));
    const positions = Array.from({ length: deepest }, (_, index) => index);
    this.byDrafter.columns = [left("proposed by"), "verify steps", ...positions.map((index) => count(index + 1))];
    this.byDrafter.update(
      rows.toReversed().map(({ drafter, steps, shares }) => [
        drafter === null ? "n-grams, or unknown" : `drafter ${drafter}`,
        count(steps),
        ...positions.map((index) => (index < shares.length ? percent(shares[index]) : "")),
      ]),
    );
  }

  updateStrategies(all) {
    const steps = new Map();
    for (const each of all) steps.set(each.bucket, (steps.get(each.bucket) ?? 0) + each.steps);
    this.strategies.update(
      all.map((each) => [
        each.bucket === 1 ? "1" : `≤ ${each.bucket}`,
        strategyName(each),
        `${count(each.steps)} (${percent(each.steps / steps.get(each.bucket))})`,
        count(each.explored),
        each.control ? "–" : number(each.predicted, 0),
        number(each.measured, 0),
      ]),
    );
  }
}

function summary({ mode, savings, gave_up: gaveUp }) {
  if (mode === "off") return "This job decodes without speculation.";
  if (!savings) return "Savings are not known yet: too few control runs are over.";
  const cost = `${count(savings.runs)} control runs, ${seconds(savings.control_seconds)} together, cost ${seconds(savings.control_cost)}; overhead of speculation ${seconds(savings.overhead)}`;
  return `Saved ${saving(savings.total)} of all ranks' time; ${cost}.${gaveUp ? " It cost more than it saved and is paused." : ""}`;
}

function acceptLength(parts) {
  const rows = parts.reduce((total, part) => total + part.rows, 0);
  return rows ? number(parts.reduce((total, part) => total + part.tokens, 0) / rows, 2) : "";
}

function strategyName({ name, control, drafter }) {
  if (control) return `${name} (control run)`;
  return drafter === null ? name : `${name}, drafter ${drafter}`;
}
