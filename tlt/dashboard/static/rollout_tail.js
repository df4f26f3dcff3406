// The tail of a rollout batch: when answers finish, how long they are, which ones still run.

import { Chart, joined } from "./charts.js";
import { Table, card, h, left, setText } from "./dom.js";
import { count, percent, seconds } from "./format.js";

export class TailCard {
  constructor() {
    this.finished = new Chart("Finished answers (% of the batch)", {
      x: { name: "after", format: seconds },
      format: (value) => `${Math.round(value)} %`,
      series: [
        { name: "this batch", colour: "series-1", steps: true },
        { name: "previous training batch", colour: "series-2", dashed: true, steps: true, width: 1.5 },
      ],
      top: 100,
      empty: "No answer yet.",
    });
    this.lengths = new Chart("Lengths of this batch's answers (tokens)", {
      x: { name: "about", format: (tokens) => `${count(tokens)} tokens`, tick: count },
      format: count,
      series: [{ name: "answers", colour: "series-1", bars: true, width: 0 }],
      empty: "No answer yet.",
    });
    this.summary = h("p", { class: "hint" });
    this.longest = new Table([left("prompt · member"), left("worker"), "for", "attempt"]);
    this.element = card(
      "The tail",
      { id: "tail", wide: true },
      this.summary,
      h(
        "div",
        { class: "charts" },
        this.finished.element,
        this.lengths.element,
        h("div", {}, h("h3", {}, "Longest running answers"), this.longest.element),
      ),
    );
  }

  close() {
    this.finished.close();
    this.lengths.close();
  }

  // `hasSession`: whether there is a session that knows the running answers.
  update(tail, run, hasSession) {
    if (tail === null) return;
    this.finished.set(joined([tail.current, tail.previous].map((curve) => points(curve, tail))));
    const { width, counts } = tail.lengths;
    this.lengths.set(counts.some(Boolean) ? [counts.map((_, index) => (index + 0.5) * width), counts] : [[], []]);
    setText(this.summary, summary(tail, run, hasSession));
    this.longest.empty = !run.open ? "The run is over." : hasSession ? "No answer is running." : "Only the session knows the running answers.";
    this.longest.update(
      tail.longest.map((answer) => [
        `${answer.prompt} · ${answer.member}`,
        answer.worker ?? "?",
        seconds(answer.seconds),
        count(answer.attempt + 1),
      ]),
    );
  }
}

function points(curve, tail) {
  if (!curve) return [[], []];
  const scale = (100 * curve.stride) / Math.max(1, curve.expected);
  const at = [0, ...curve.done];
  const share = at.map((_, index) => Math.min(100, index * scale));
  const open = curve === tail.current && tail.seconds > (at.at(-1) ?? 0);
  return open ? [[...at, tail.seconds], [...share, share.at(-1)]] : [at, share];
}

function summary(tail, { head, live, open }, hasSession) {
  if (!tail.current) return "No rollout batch yet.";
  const name = tail.current.purpose === "eval" ? "Evaluation" : `Step ${tail.current.step}`;
  const scored = `${percent(head.settled / Math.max(1, head.expected))} scored`;
  if (!live && head.settled < head.expected) return `${name}: ${scored} ${open ? "at the last journal entry" : "when the job ended"}.`;
  if (!tail.seconds) return `${name}: all answers were finished after ${seconds(tail.current.done.at(-1) ?? 0)}.`;
  const parts = [`${name}, after ${seconds(tail.seconds)}: ${scored}`];
  if (tail.running) parts.push(`${count(tail.running)} running`);
  if (tail.queued) parts.push(`${count(tail.queued)} ${hasSession ? "in the queue" : "unfinished"}`);
  const { early_end: early, forecast } = tail;
  if (early) parts.push(`ends with ${count(early.wanted)} of ${count(early.issued)} groups, ${count(early.complete)} complete`);
  if (tail.waiting_groups) parts.push(`${count(tail.waiting_groups)} groups wait`);
  if (tail.next_step) parts.push(`${count(tail.next_step.finished)} of ${count(tail.next_step.answers)} answers of the next step are finished`);
  const end = forecast
    ? ` Forecast of the last answer: in ${seconds(forecast.p50)}, with 90 % probability within ${seconds(forecast.p90)}.`
    : "";
  return `${parts.join(", ")}.${end}`;
}
