// Where the time went: of the job by phase, of each worker by duty.

import { card, h, renew, table } from "./dom.js";
import { count, percent, saving, seconds } from "./format.js";

export class TimesCard {
  constructor() {
    this.phases = h("div");
    this.workers = h("div");
    this.steps = h("div");
    this.element = card(
      "Where the time went",
      { id: "times", wide: true },
      this.phases,
      h("h3", {}, "By worker and duty"),
      this.workers,
      h("h3", {}, "By step, newest first"),
      this.steps,
    );
  }

  update(times) {
    if (times === null) return;
    const total = Object.values(times.phases).reduce((all, each) => all + each, 0);
    renew(
      this.phases,
      table(
        [{ name: "phase", left: true }, { name: "time" }, { name: "share" }],
        Object.entries(times.phases).map(([name, spent]) => [name, seconds(spent), percent(spent / (total || 1))]),
        { empty: "No time has passed yet." },
      ),
    );
    renew(this.workers, byDuty("worker", Object.entries(times.workers)));
    const steps = [...times.steps].reverse().slice(0, 200);
    const duties = names(steps.map((step) => step.duties));
    renew(
      this.steps,
      table(
        [{ name: "step" }, { name: "time" }, ...duties.map((name) => ({ name })), { name: "saved on all ranks" }, { name: "saved of the wait" }],
        steps.map((step) => [
          count(step.step),
          seconds(step.seconds),
          ...duties.map((duty) => seconds(step.duties[duty] ?? 0)),
          saving(step.saved),
          saving(step.critical),
        ]),
        { empty: "No step yet." },
      ),
    );
  }
}

function names(all) {
  return [...new Set(all.flatMap((duties) => Object.keys(duties)))].sort();
}

function byDuty(name, rows) {
  const duties = names(rows.map(([, spent]) => spent));
  return table(
    [{ name, left: true }, ...duties.map((duty) => ({ name: duty })), { name: "total" }],
    rows.map(([worker, spent]) => [
      worker,
      ...duties.map((duty) => seconds(spent[duty] ?? 0)),
      seconds(Object.values(spent).reduce((all, each) => all + each, 0)),
    ]),
    { empty: "No worker yet." },
  );
}
