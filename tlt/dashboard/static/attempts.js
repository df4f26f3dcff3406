// How often the job was begun again, and each life of a worker that ended or began on the way.

import { card, h, renew, say, table } from "./dom.js";
import { count, plural, seconds } from "./format.js";

const LIVES = 200;

export class AttemptsCard {
  constructor() {
    this.sum = h("p");
    this.attempts = h("div");
    this.lives = h("div");
    this.element = card(
      "Attempts",
      { id: "attempts", wide: true },
      this.sum,
      this.attempts,
      h("h3", {}, "Lives of workers that ended, or began later; newest first"),
      this.lives,
    );
  }

  update(told) {
    if (told === null) return;
    const ended = told.incarnations.filter((life) => life.ended !== null);
    say(this.sum, `${plural(told.attempts.length, "attempt")}; ${plural(ended.length, "life of a worker", "lives of workers")} ended before the job did.`);
    renew(
      this.attempts,
      table(
        [{ name: "attempt" }, { name: "coordinator" }, { name: "from" }, { name: "until" }, { name: "at step" }, { name: "began because", left: true }, { name: "ended because", left: true }],
        told.attempts.map((each, index) => [
          count(index + 1),
          `epoch ${count(each.epoch)}`,
          seconds(each.began),
          each.ended === null ? "now" : seconds(each.ended),
          count(each.step),
          each.why,
          each.end ?? "–",
        ]),
        { empty: "The job has not begun." },
      ),
    );
    renew(
      this.lives,
      table(
        [{ name: "worker", left: true }, { name: "incarnation" }, { name: "from" }, { name: "until" }, { name: "ended because", left: true }],
        told.incarnations.slice(0, LIVES).map((life) => [
          life.worker,
          count(life.incarnation),
          seconds(life.began),
          life.ended === null ? "now" : seconds(life.ended),
          life.end ?? "–",
        ]),
        {
          caption: told.incarnations.length > LIVES ? `the newest ${count(LIVES)} of ${count(told.incarnations.length)}` : undefined,
          empty: "All workers are those that the job began with.",
        },
      ),
    );
  }
}
