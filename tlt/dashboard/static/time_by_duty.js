// Seconds of the job by phase, of each worker by duty, and of each step.

import { Table, card, h, left } from "./dom.js";
import { count, percent, saving, seconds, words } from "./format.js";

const STEPS = 200;

export class TimesCard {
  constructor() {
    this.phases = new Table([left("phase"), "time", "share"], { empty: "No time has passed yet." });
    this.workers = new Table([], { empty: "No worker yet." });
    this.steps = new Table([], { empty: "No step yet." });
    this.element = card(
      "Where the time went",
      { id: "times", wide: true },
      this.phases.element,
      h("h3", {}, "By worker and duty"),
      this.workers.element,
      h("h3", {}, "By step, newest first"),
      this.steps.element,
    );
  }

  update(times) {
    if (times === null) return;
    const total = sum(Object.values(times.phases));
    this.phases.update(
      Object.entries(times.phases).map(([name, spent]) => [words(name), seconds(spent), percent(spent / (total || 1))]),
    );
    const workers = Object.entries(times.workers);
    const ofWorkers = duties(workers.map(([, spent]) => spent));
    this.workers.columns = [left("worker"), ...ofWorkers.map(words), "total"];
    this.workers.update(
      workers.map(([worker, spent]) => [worker, ...ofWorkers.map((duty) => seconds(spent[duty] ?? 0)), seconds(sum(Object.values(spent)))]),
    );
    const steps = times.steps.toReversed().slice(0, STEPS);
    const ofSteps = duties(steps.map((step) => step.duties));
    this.steps.columns = ["step", "time", ...ofSteps.map(words), "saved on all ranks", "saved of the wait"];
    this.steps.update(
      steps.map((step) => [
        count(step.step),
        seconds(step.seconds),
        ...ofSteps.map((duty) => seconds(step.duties[duty] ?? 0)),
        saving(step.savings),
        saving(step.wait_savings),
      ]),
    );
  }
}

function duties(all) {
  return [...new Set(all.flatMap((spent) => Object.keys(spent)))].sort();
}

function sum(values) {
  return values.reduce((total, each) => total + each, 0);
}
