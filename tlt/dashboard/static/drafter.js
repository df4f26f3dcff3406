// The drafter: what training it took and gave, and why it was trained or left alone.

import { Chart } from "./charts.js";
import { card, h, renew, say, show, table } from "./dom.js";
import { clock, count, number, percent, seconds } from "./format.js";

const DECISIONS = {
  train: "idle workers train it",
  rest: "training would not pay now",
  buy: "all workers train it for a while",
  adopt: "a better one is used from now on",
  reject: "the new one is not better",
  return: "back to the one in use",
};

export class DrafterCards {
  constructor() {
    this.loss = new Chart("Loss of the drafter's micro-batches", {
      x: { name: "after", format: seconds, tick: clock },
      format: (value) => number(value, 2),
      series: [{ name: "loss", colour: "series-1", points: true }],
      empty: "No micro-batch yet.",
    });
    this.canary = new Chart("Canary: tokens a round on answers nobody trained on", {
      x: { name: "drafter", format: count, whole: true },
      format: (value) => number(value, 2),
      series: [
        { name: "this drafter", colour: "series-1", points: true },
        { name: "the one in use then", colour: "series-2", dashed: true, points: true },
      ],
      empty: "No drafter was measured yet.",
    });
    this.sum = h("p");
    this.seconds = h("div");
    this.decisions = h("div");
    this.details = h(
      "div",
      {},
      h("div", { class: "charts" }, this.loss.element, this.canary.element),
      h("h3", {}, "Decisions, newest first"),
      this.decisions,
      h("h3", {}, "Where its time went (device-seconds)"),
      this.seconds,
    );
    this.element = card("Drafter", { id: "drafter", wide: true }, h("div", { class: "stack" }, this.sum, this.details));
  }

  close() {
    this.loss.close();
    this.canary.close();
  }

  update(drafter) {
    if (drafter === null) return;
    const { train, account, losses } = drafter;
    say(this.sum, sum(train, account));
    show(this.details, train !== "off");
    this.loss.set([losses.map(([at]) => at), losses.map(([, loss]) => loss)]);
    const measured = account?.measured ?? [];
    this.canary.set([
      measured.map((each) => each.version),
      measured.map((each) => each.trained),
      measured.map((each) => each.used),
    ]);
    renew(this.decisions, decisions(account?.decisions ?? []));
    renew(this.seconds, spent(account));
  }
}

function sum(train, account) {
  if (train === "off") return "This job trains no drafter (drafter.train: off).";
  if (!account) return "Nobody has trained it yet: a worker does once its queue is drained.";
  const used = account.measured.filter((each) => each.adopted).length;
  const idle = account.idle_used + account.idle_left;
  const share = idle ? `${percent(account.harvested / idle)} of ${seconds(idle)} idle` : "no idle second";
  return `${count(account.micro_batches)} micro-batches, ${count(account.measured.length)} drafters measured, ${count(used)} used. Harvested: ${share}; bought: ${seconds(account.bought)}.`;
}

function decisions(all) {
  return table(
    [{ name: "step" }, { name: "decision", left: true }, { name: "saves, predicted" }, { name: "costs" }, { name: "why", left: true }],
    [...all]
      .reverse()
      .map((one) => [
        count(one.step),
        DECISIONS[one.what] ?? one.what,
        one.saved || one.cost ? seconds(one.saved) : "–",
        one.saved || one.cost ? seconds(one.cost) : "–",
        one.why,
      ]),
    { empty: "No decision yet." },
  );
}

function spent(account) {
  if (!account) return h("p", { class: "empty" }, "Nothing yet.");
  const rows = [
    ["idle, with the drafter", account.idle_used],
    ["idle, left alone", account.idle_left],
    ["bought", account.bought],
    ["in micro-batches that were kept, idle", account.harvested],
    ["in micro-batches that were kept, bought", account.harvested_bought],
    ["reading what others wrote", account.reading],
    ["merging and measuring", account.merging],
    ["handing in", account.publishing],
    ["in micro-batches that were dropped", account.dropped],
  ].map(([name, value]) => [name, seconds(value)]);
  const { tokens } = account;
  rows.push(
    ["a micro-batch, lately", seconds(account.typical_seconds)],
    ["stopped when told, half the times within", seconds(account.preempt_p50)],
    ["stopped when told, 99 % within", seconds(account.preempt_p99)],
    ["tokens learned from: own, others', being written, step before", [tokens.own, tokens.others, tokens.running, tokens.previous].map(count).join(" · ")],
  );
  return table([{ name: "what", left: true }, { name: "" }], rows);
}
