// Attempts of a job, and the incarnations of workers that ended or began while it ran.

import { Table, card, h, left, setText } from "./dom.js";
import { count, plural, seconds } from "./format.js";

const LISTED = 200;

export class AttemptsCard {
  constructor() {
    this.summary = h("p");
    this.attempts = new Table(
      ["attempt", "coordinator", "from", "until", "at step", left("began because"), left("ended because")],
      { empty: "The job has not begun." },
    );
    this.incarnations = new Table([left("worker"), "incarnation", "from", "until", left("ended because")], {
      empty: "All workers are those that the job began with.",
    });
    this.element = card(
      "Attempts",
      { id: "attempts", wide: true },
      this.summary,
      this.attempts.element,
      h("h3", {}, "Incarnations of workers that ended, or began later; newest first"),
      this.incarnations.element,
    );
  }

  update(view) {
    if (view === null) return;
    const { attempts, incarnations } = view;
    const ended = incarnations.filter((each) => each.ended !== null).length;
    setText(
      this.summary,
      `${plural(attempts.length, "attempt")}; ${plural(ended, "incarnation of a worker", "incarnations of workers")} ended before the job did.`,
    );
    this.attempts.update(
      attempts.map((each, index) => [
        count(index + 1),
        `epoch ${count(each.epoch)}`,
        ...period(each),
        count(each.step),
        each.why,
        each.end ?? "–",
      ]),
    );
    this.incarnations.caption = incarnations.length > LISTED ? `the newest ${count(LISTED)} of ${count(incarnations.length)}` : null;
    this.incarnations.update(
      incarnations.slice(0, LISTED).map((each) => [each.worker, count(each.incarnation), ...period(each), each.end ?? "–"]),
    );
  }
}

function period({ began, ended }) {
  return [seconds(began), ended === null ? "now" : seconds(ended)];
}
