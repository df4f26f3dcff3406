// The figures at the top of a job's page.

import { h, replaceChanged } from "./dom.js";
import { count, number, plural, seconds, when, words } from "./format.js";

const LABELS = {
  step: "Step",
  phase: "Phase",
  answers: "Answers of this batch",
  rate: "Tokens per second",
  time: "Time",
  workers: "Workers",
};

export class JobFigures {
  constructor() {
    this.values = Object.fromEntries(Object.keys(LABELS).map((name) => [name, h("dd")]));
    this.progress = h("progress", { max: "1", "aria-label": "steps done" });
    this.element = h(
      "dl",
      { class: "figures" },
      Object.entries(LABELS).map(([name, label]) =>
        h("div", { class: "figure" }, h("dt", {}, label), this.values[name], name === "step" ? this.progress : null),
      ),
    );
  }

  update(run) {
    const { head } = run;
    const set = (name, value, note) => replaceChanged(this.values[name], value, note ? h("small", {}, note) : null);
    const origin = head.starts_from ? `, started from ${head.starts_from}` : "";
    // a job of no steps only evaluates
    const step = head.steps ? `${count(head.step)} of ${count(head.steps)}` : "none";
    set("step", step, `policy ${head.version}${origin}`);
    this.progress.value = head.steps ? head.step / head.steps : Number(head.status === "done");
    set("phase", words(head.phase), run.open && run.quiet > 5 ? `last entry ${seconds(run.quiet)} ago` : null);
    set(
      "answers",
      head.expected ? `${count(head.settled)} of ${count(head.expected)}` : "–",
      head.expected ? "scored" : "no batch is open",
    );
    set("rate", rate(head.tokens_per_second), run.live ? "over 10 s" : "over its last 10 s");
    set("time", seconds(run.live ? run.now : head.seconds), head.began ? `began ${when(head.began)}` : null);
    const away = head.duties.away ?? 0;
    const lost = head.losses ? `${plural(head.losses, "loss", "losses")} so far` : "none lost";
    set("workers", count(head.workers), away ? `${away} away` : lost);
  }
}

function rate(tokens) {
  return tokens === null ? "–" : `${tokens < 100 ? number(tokens, 1) : count(tokens)} /s`;
}
