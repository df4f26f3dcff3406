// Learning: rewards, evaluations, and whether the policy's updates are sound.

import { Chart, joined } from "./charts.js";
import { Table, card, h } from "./dom.js";
import { count, number, percent, seconds } from "./format.js";

const COLOURS = ["series-1", "series-2", "series-3", "series-4"];
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
      uniformGroups: chart("Groups without advantage (% of the step's)", [one("all rewards equal"), one("replaced", "series-2"), one("decoding of extra groups", "series-3")], { format: (v) => `${Math.round(v)} %`, top: 100 }),
      gradient: chart("Gradient norm", [one("before clipping")], { format: (v) => number(v, 3) }),
      loss: chart("Loss of the update", [one("loss")], { format: (v) => number(v, 3), zero: false }),
      time: chart("Seconds of a step", [one("rollouts"), one("update", "series-2")], { format: (v) => number(v, 1) }),
    };
    // held-out rewards by set, where there are several
    this.bySet = null;
    this.evals = new Table([], { empty: "No evaluation is over." });
    this.grid = h("div", { class: "charts" }, Object.values(this.charts).map((each) => each.element));
    this.element = card(
      "Learning",
      { id: "learning", wide: true },
      this.grid,
      h("h3", {}, "Evaluations"),
      this.evals.element,
    );
  }

  close() {
    for (const chart of Object.values(this.charts)) chart.close();
    this.bySet?.close();
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
    set("clipped", updates, (s) => 100 * s.metrics.clipped_low, (s) => 100 * s.metrics.clipped_high, (s) => 100 * s.truncated);
    const share = (groups, step) => (100 * groups) / (prompts + step.replaced_groups);
    set("uniformGroups", steps, (s) => share(s.uniform_groups, s), (s) => share(s.replaced_groups, s), (s) => 100 * s.extra_share);
    set("gradient", updates, (s) => s.metrics.gradient_norm);
    set("loss", updates, (s) => s.metrics.loss);
    set("time", steps, (s) => s.rollout_seconds, (s) => s.update_seconds);
    this.updateSets(evals, learning.binary_rewards);
  }

  updateSets(evals, isAccuracy) {
    const sets = evals[0]?.sets ?? [];
    if (sets.length > 1) {
      if (this.bySet === null) {
        const series = sets.map((each, index) => ({ name: label(each), colour: COLOURS[index % COLOURS.length], dashed: index >= COLOURS.length, points: true }));
        this.bySet = new Chart("Held-out mean reward by set", { x: STEP, series });
        this.charts.reward.element.after(this.bySet.element);
      }
      this.bySet.set([evals.map((done) => done.step), ...sets.map((_, index) => evals.map((done) => done.sets[index].mean))]);
    }
    const score = (value) => (isAccuracy ? percent(value, 1) : number(value, 3));
    const mean = isAccuracy ? "accuracy" : "mean reward";
    this.evals.columns = ["after step", "policy", "set", mean, "± standard error", "pass@k", "maj@k", "problems", "mean length", "took"];
    this.evals.update(
      evals.toReversed().flatMap((done) =>
        done.sets.map((each) => [
          count(done.step),
          count(done.version),
          label(each),
          score(each.mean),
          score(each.stderr),
          each.answers > 1 && each.pass_at[each.answers] !== undefined ? percent(each.pass_at[each.answers], 1) : "–",
          each.majority === null ? "–" : percent(each.majority, 1),
          count(each.problems),
          `${count(each.length.mean)} tokens`,
          seconds(done.seconds),
        ]),
      ),
    );
  }
}

function label(set) {
  const name = set.name === "eval" ? "held out" : set.name;
  return set.answers > 1 ? `${name}, avg@${set.answers}` : name;
}
