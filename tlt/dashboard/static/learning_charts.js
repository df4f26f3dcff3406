// Learning: what the policy is worth, and whether its updates are sound.

import { Chart, joined } from "./charts.js";
import { card, h, renew, table } from "./dom.js";
import { count, number, percent, seconds } from "./format.js";

const STEP = { name: "step", format: count, whole: true };

export class LearningCard {
  constructor() {
    const chart = (title, series, options = {}) => new Chart(title, { x: STEP, series, ...options });
    const one = (name, colour = "series-1", more = {}) => ({ name, colour, points: true, ...more });
    this.charts = {
      reward: chart("Reward (mean) of rollouts, and held out", [one("rollouts"), one("held out", "series-2")]),
      length: chart("Length of answers (tokens)", [one("mean"), one("9 of 10 below", "series-2"), one("longest", "series-3")], { format: count }),
      entropy: chart("Entropy (nats a token)", [one("entropy")], { format: (v) => number(v, 3) }),
      kl: chart("KL to the sampling policy (nats a token)", [one("kl"), one("to the reference", "series-2")], { format: (v) => number(v, 4) }),
      clipped: chart("Clipped (% of tokens; answers out of room: % of answers)", [one("ratio too low"), one("ratio too high", "series-2"), one("answers out of room", "series-3")], { format: (v) => `${number(v, 1)} %` }),
      agreed: chart("Groups without advantage (% of the step's)", [one("all answers scored the same")], { format: (v) => `${Math.round(v)} %`, top: 100 }),
      gradient: chart("Gradient norm", [one("before clipping")], { format: (v) => number(v, 3) }),
      loss: chart("Loss of the update", [one("loss")], { format: (v) => number(v, 3), zero: false }),
      time: chart("Seconds of a step", [one("rollouts"), one("update", "series-2")], { format: (v) => number(v, 1) }),
    };
    this.evals = h("div");
    this.element = card(
      "Learning",
      { id: "learning", wide: true },
      h("div", { class: "charts" }, Object.values(this.charts).map((each) => each.element)),
      h("h3", {}, "Evaluations"),
      this.evals,
    );
  }

  close() {
    for (const chart of Object.values(this.charts)) chart.close();
  }

  update(learning) {
    if (learning === null) return;
    const { steps, evals, prompts } = learning;
    const updates = steps.filter((step) => step.metrics);
    const at = (some) => some.map((step) => step.step);
    const put = (name, some, ...columns) => this.charts[name].set([at(some), ...columns.map((pick) => some.map(pick))]);
    this.charts.reward.set(
      joined([
        [at(steps), steps.map((step) => step.reward)],
        [at(evals), evals.map((done) => done.mean)],
      ]),
    );
    put("length", steps, (s) => s.length.mean, (s) => s.length.p90, (s) => s.length.max);
    put("entropy", updates, (s) => s.metrics.entropy);
    put("kl", updates, (s) => s.metrics.sampling_kl, (s) => s.metrics.reference_kl);
    put("clipped", updates, (s) => 100 * s.metrics.clipped_low, (s) => 100 * s.metrics.clipped_high, (s) => 100 * s.clipped);
    put("agreed", steps, (s) => (100 * s.agreed) / prompts);
    put("gradient", updates, (s) => s.metrics.gradient_norm);
    put("loss", updates, (s) => s.metrics.loss);
    put("time", steps, (s) => s.rollout_seconds, (s) => s.learn_seconds);
    const isShare = learning.binary_rewards;
    const figure = (value) => (isShare ? percent(value, 1) : number(value, 3));
    renew(
      this.evals,
      table(
        [{ name: "after step" }, { name: "policy" }, { name: isShare ? "accuracy" : "mean reward" }, { name: "± standard error" }, { name: "problems" }, { name: "mean length" }, { name: "took" }],
        [...evals].reverse().map((done) => [
          count(done.step),
          count(done.version),
          figure(done.mean),
          figure(done.stderr),
          count(done.problems),
          `${count(done.length.mean)} tokens`,
          seconds(done.seconds),
        ]),
        { empty: "No evaluation is over." },
      ),
    );
  }
}
