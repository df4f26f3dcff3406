// Learning: rewards, evaluations, and whether the policy's updates are sound.

import { Chart, joined } from "./charts.js";
import { Table, card, h } from "./dom.js";
import { count, number, percent, seconds } from "./format.js";

const STEP = { name: "step", format: count, whole: true };

export class LearningCard {
  constructor() {
    const chart = (title, series, options = {}) => new Chart(title, { x: STEP, series, ...options });
    const one = (name, colour = "series-1") => ({ name, colour, points: true });
    this.charts = {
      reward: chart("Mean reward", [one("rollouts"), one("held out", "series-2")]),
      length: chart("Length of answers (tokens)", [one("mean"), one("90 % are below", "series-2"), one("longest", "series-3")], { format: count }),
      entropy: chart("Entropy (nats a token)", [one("entropy")], { format: (v) => number(v, 3) }),
      kl: chart("KL (nats a token)", [one("to the sampling policy"), one("to the reference", "series-2")], { format: (v) => number(v, 4) }),
      clipped: chart("Clipped (% of tokens, % of answers)", [one("ratio too low"), one("ratio too high", "series-2"), one("answers at the token limit", "series-3")], { format: (v) => `${number(v, 1)} %` }),
      agreed: chart("Groups without advantage (% of the step's)", [one("all rewards equal"), one("replaced", "series-2"), one("decoding of extra groups", "series-3")], { format: (v) => `${Math.round(v)} %`, top: 100 }),
      gradient: chart("Gradient norm", [one("before clipping")], { format: (v) => number(v, 3) }),
      loss: chart("Loss of the update", [one("loss")], { format: (v) => number(v, 3), zero: false }),
      time: chart("Seconds of a step", [one("rollouts"), one("update", "series-2")], { format: (v) => number(v, 1) }),
    };
    this.evals = new Table([], { empty: "No evaluation is over." });
    this.element = card(
      "Learning",
      { id: "learning", wide: true },
      h("div", { class: "charts" }, Object.values(this.charts).map((each) => each.element)),
      h("h3", {}, "Evaluations"),
      this.evals.element,
    );
  }

  close() {
    for (const chart of Object.values(this.charts)) chart.close();
  }

  update(learning) {
    if (learning === null) return;
    const { steps, evals, prompts } = learning;
    const updates = steps.filter((step) => step.metrics);
    const numbers = (rows) => rows.map((row) => row.step);
    const set = (name, rows, ...columns) => this.charts[name].set([numbers(rows), ...columns.map((column) => rows.map(column))]);
    this.charts.reward.set(
      joined([
        [numbers(steps), steps.map((step) => step.reward)],
        [numbers(evals), evals.map((done) => done.mean)],
      ]),
    );
    set("length", steps, (s) => s.length.mean, (s) => s.length.p90, (s) => s.length.max);
    set("entropy", updates, (s) => s.metrics.entropy);
    set("kl", updates, (s) => s.metrics.sampling_kl, (s) => s.metrics.reference_kl);
    set("clipped", updates, (s) => 100 * s.metrics.clipped_low, (s) => 100 * s.metrics.clipped_high, (s) => 100 * s.clipped);
    const share = (groups, step) => (100 * groups) / (prompts + step.replaced);
    set("agreed", steps, (s) => share(s.agreed, s), (s) => share(s.replaced, s), (s) => 100 * s.extra_share);
    set("gradient", updates, (s) => s.metrics.gradient_norm);
    set("loss", updates, (s) => s.metrics.loss);
    set("time", steps, (s) => s.rollout_seconds, (s) => s.learn_seconds);
    const isAccuracy = learning.binary_rewards;
    const score = (value) => (isAccuracy ? percent(value, 1) : number(value, 3));
    this.evals.columns = ["after step", "policy", isAccuracy ? "accuracy" : "mean reward", "± standard error", "problems", "mean length", "took"];
    this.evals.update(
      evals.toReversed().map((done) => [
        count(done.step),
        count(done.version),
        score(done.mean),
        score(done.stderr),
        count(done.problems),
        `${count(done.length.mean)} tokens`,
        seconds(done.seconds),
      ]),
    );
  }
}
