// Drafter training: loss, evaluations, decisions, and the time that it took.

import { Chart } from "./charts.js";
import { Table, card, h, left, setText, show } from "./dom.js";
import { clock, count, number, percent, seconds } from "./format.js";
import { DECISION_NAMES } from "./names.js";

export class DrafterCard {
  constructor() {
    this.loss = new Chart("Loss of the drafter's micro-batches", {
      x: { name: "after", format: seconds, tick: clock },
      format: (value) => number(value, 2),
      series: [{ name: "loss", colour: "series-1", points: true }],
      empty: "No micro-batch yet.",
    });
    this.evaluations = new Chart("Evaluation: accept length on held-out prompts", {
      x: { name: "drafter", format: count, whole: true },
      format: (value) => number(value, 2),
      series: [
        { name: "this drafter", colour: "series-1", points: true },
        { name: "the one in use before", colour: "series-2", dashed: true, points: true },
      ],
      empty: "No drafter was evaluated yet.",
    });
    this.summary = h("p");
    this.decisions = new Table(["step", left("decision"), left("why")], { empty: "No decision yet." });
    this.seconds = new Table([left("what"), ""]);
    this.details = h(
      "div",
      {},
      h("div", { class: "charts" }, this.loss.element, this.evaluations.element),
      h("h3", {}, "Decisions, newest first"),
      this.decisions.element,
      h("h3", {}, "Where its time went (device-seconds)"),
      this.seconds.element,
    );
    this.element = card("Drafter", { id: "drafter", wide: true }, h("div", { class: "stack" }, this.summary, this.details));
  }

  close() {
    this.loss.close();
    this.evaluations.close();
  }

  update(drafter) {
    if (drafter === null) return;
    const { train, account, losses } = drafter;
    setText(this.summary, summary(train, account));
    show(this.details, train !== "off");
    this.loss.set([losses.map(([at]) => at), losses.map(([, loss]) => loss)]);
    const evaluations = account?.evaluations ?? [];
    this.evaluations.set([
      evaluations.map((each) => each.version),
      evaluations.map((each) => each.accept_length),
      evaluations.map((each) => each.accept_length_before),
    ]);
    this.decisions.update((account?.decisions ?? []).toReversed().map(decision));
    this.seconds.update(account ? timeRows(account) : []);
  }
}

function summary(train, account) {
  if (train === "off") return "This job trains no drafter (drafter.train: off).";
  if (!account) return "The drafter was not trained yet: a worker starts once its queue is drained.";
  const adopted = account.evaluations.filter((each) => each.adopted).length;
  const idle = account.idle_used + account.idle_left;
  const share = idle ? `${percent(account.idle_kept / idle)} of ${seconds(idle)} idle time` : "no idle time";
  return `${count(account.micro_batches)} micro-batches, ${count(account.evaluations.length)} drafters evaluated, ${count(adopted)} adopted. Used ${share}.`;
}

function decision(one) {
  return [count(one.step), DECISION_NAMES[one.kind] ?? one.kind, one.why];
}

function timeRows(account) {
  const { own, others, unfinished, earlier } = account.tokens;
  return [
    ...[
      ["idle, used for the drafter", account.idle_used],
      ["idle, unused", account.idle_left],
      ["in kept micro-batches", account.idle_kept],
      ["reading answers of other workers", account.reading_seconds],
      ["merging and evaluating", account.merging_seconds],
      ["handing in deltas", account.publishing_seconds],
      ["in dropped micro-batches", account.dropped_seconds],
      ["one micro-batch, recently", account.median_seconds],
      ["from the command to stop until stopped, median", account.stop_p50],
      ["from the command to stop until stopped, 99 %", account.stop_p99],
    ].map(([name, value]) => [name, seconds(value)]),
    ["trained tokens: own, other workers', unfinished, earlier steps", [own, others, unfinished, earlier].map(count).join(" · ")],
  ];
}
