// The tail: how the answers of a round come in, how long they are, who still writes.

import { Chart, joined } from "./charts.js";
import { card, h, renew, say, table } from "./dom.js";
import { count, percent, seconds } from "./format.js";

export class TailCard {
  constructor() {
    this.done = new Chart("Answers that are there (% of the round)", {
      x: { name: "after", format: seconds },
      format: (value) => `${Math.round(value)} %`,
      series: [
        { name: "this round", colour: "series-1", steps: true },
        { name: "training round before", colour: "series-2", dashed: true, steps: true, width: 1.5 },
      ],
      top: 100,
      empty: "No answer yet.",
    });
    this.lengths = new Chart("How long the answers of this round are (tokens)", {
      x: { name: "about", format: (tokens) => `${count(tokens)} tokens`, tick: count },
      format: count,
      series: [{ name: "answers", colour: "series-1", bars: true, width: 0 }],
      empty: "No answer yet.",
    });
    this.sentence = h("p", { class: "hint" });
    this.longest = h("div");
    this.element = card(
      "The tail",
      { id: "tail", wide: true },
      this.sentence,
      h(
        "div",
        { class: "charts" },
        this.done.element,
        this.lengths.element,
        h("div", {}, h("h3", {}, "Longest in hand"), this.longest),
      ),
    );
  }

  close() {
    this.done.close();
    this.lengths.close();
  }

  // `known`: whether there is a session to ask who has what in hand.
  update(tail, run, known) {
    if (tail === null) return;
    this.done.set(joined([tail.current, tail.previous].map((curve) => points(curve, tail))));
    const { width, counts } = tail.lengths;
    this.lengths.set(counts.some(Boolean) ? [counts.map((_, index) => (index + 0.5) * width), counts] : [[], []]);
    say(this.sentence, sentence(tail, run, known));
    renew(
      this.longest,
      table(
        [{ name: "prompt · member", left: true }, { name: "worker", left: true }, { name: "for" }, { name: "attempt" }],
        tail.longest.map((held) => [
          `${held.prompt} · ${held.member}`,
          held.worker ?? "?",
          seconds(held.seconds),
          count(held.attempt + 1),
        ]),
        { empty: nobody(run, known) },
      ),
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

function nobody(run, known) {
  if (!run.open) return "The run is over.";
  return known ? "Nobody has an answer in hand." : "Only its session knows.";
}

function sentence(tail, { head, live, open }, known) {
  if (!tail.current) return "No round yet.";
  const name = tail.current.purpose === "eval" ? "Evaluation" : `Step ${tail.current.step}`;
  const scored = `${percent(head.settled / Math.max(1, head.expected))} scored`;
  if (!live && head.settled < head.expected) return `${name}: ${scored} when ${open ? "it was last heard of" : "the job ended"}.`;
  if (!tail.seconds) return `${name}: all answers were there after ${seconds(tail.current.done.at(-1) ?? 0)}.`;
  const parts = [`${name}, ${seconds(tail.seconds)} in: ${scored}`];
  if (tail.running) parts.push(`${count(tail.running)} in hand`);
  if (tail.queued) parts.push(`${count(tail.queued)} ${known ? "in the queue" : "still to come"}`);
  const last = tail.forecast;
  const end = last
    ? ` The last one should be there in ${seconds(last.p50)}, 9 of 10 times within ${seconds(last.p90)}.`
    : "";
  return `${parts.join(", ")}.${end}`;
}
