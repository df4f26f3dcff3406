// Samples: a prompt and its group's answers side by side, tokens by how they came about.

import { ask } from "./api.js";
import { card, fill, h, say, show, table } from "./dom.js";
import { count, number, plural, seconds } from "./format.js";

const ORIGINS = { accepted: "guessed and accepted", corrected: "corrected by the policy", plain: "nothing was guessed" };

export class SampleCard {
  constructor(job) {
    this.path = `/api/jobs/${encodeURIComponent(job)}/samples`;
    // whether somebody has chosen something, which then stays
    this.touched = false;
    this.shownAt = null;
    this.head = null;
    this.isNear = false;
    // of requests: only what the last one brings is shown
    this.asked = 0;
    this.rounds = h("select", { id: "round", onchange: () => this.choose() });
    this.groups = h("div", { class: "groups" });
    this.question = h("pre", { class: "question", hidden: true });
    this.answers = h("div", { class: "sample" });
    this.complaint = h("p", { class: "complaint", role: "alert" });
    this.element = card(
      "Samples",
      {
        id: "samples",
        wide: true,
        note: [
          h("label", { for: "round" }, "Round ", this.rounds),
          h("button", { type: "button", onclick: () => this.choose() }, "Look again"),
        ],
      },
      h(
        "div",
        { class: "stack" },
        h(
          "div",
          { class: "legend" },
          Object.entries(ORIGINS).map(([origin, name]) => h("span", {}, h("i", { class: origin === "plain" ? "key-plain" : origin }), name)),
        ),
        this.complaint,
        this.groups,
        this.question,
        this.answers,
      ),
    );
    this.nearness = new IntersectionObserver((entries) => this.approach(entries.at(-1).isIntersecting), { rootMargin: "200px" });
    this.nearness.observe(this.element);
  }

  close() {
    this.nearness.disconnect();
  }

  approach(isNear) {
    this.isNear = isNear;
    this.refresh();
  }

  update(head) {
    this.head = head;
    this.refresh();
  }

  // Whenever a round is over, until somebody has chosen; and only for who is about to see it, as all
  // answers of a group are decoded.
  refresh() {
    const { head } = this;
    if (!this.isNear || this.touched || !head || head.entries < 3) return;
    const at = `${head.step} ${head.phase} ${head.settled > 0}`;
    if (at !== this.shownAt) {
      this.shownAt = at;
      this.load("");
    }
  }

  choose() {
    this.touched = true;
    this.load(this.rounds.value);
  }

  async load(round) {
    const turn = this.begin();
    const [purpose, step] = round ? round.split(" ") : [];
    const query = round ? `?step=${step}&purpose=${purpose}` : "";
    try {
      const found = await ask(`${this.path}${query}`);
      if (turn === this.asked) this.list(found);
    } catch (error) {
      if (turn !== this.asked) return;
      fill(this.groups);
      this.clear();
      say(this.complaint, error.message);
    }
  }

  begin() {
    say(this.complaint, "");
    this.asked += 1;
    return this.asked;
  }

  // What is there is of another group.
  clear() {
    show(this.question, false);
    fill(this.answers);
  }

  list({ batches: rounds, chosen, groups }) {
    if (!chosen) {
      fill(this.groups, h("p", { class: "empty" }, "No answer is there yet."));
      return;
    }
    const name = ([step, purpose]) => (purpose === "eval" ? `evaluation at step ${step}` : `step ${step}`);
    fill(this.rounds, rounds.map((each) => h("option", { value: `${each[1]} ${each[0]}` }, name(each))));
    this.rounds.value = `${chosen[1]} ${chosen[0]}`;
    const rows = groups.map((group) => [
      h("button", { type: "button", onclick: (event) => this.pick(group, event.target) }, `prompt ${group.prompt}`),
      count(group.answers),
      number(group.mean, 2),
      group.low === null ? "–" : `${number(group.low, 2)} to ${number(group.high, 2)}`,
      `${count(group.longest)} tokens`,
    ]);
    fill(
      this.groups,
      table([{ name: "group", left: true }, { name: "answers" }, { name: "mean reward" }, { name: "from, to" }, { name: "longest" }], rows, {
        caption: `${name(chosen)}: ${plural(groups.length, "group")}`,
      }),
    );
    if (groups.length) this.open(groups[0], this.groups.querySelector("button"));
    else this.clear();
  }

  pick(group, button) {
    this.touched = true;
    this.open(group, button);
  }

  async open(group, button) {
    for (const other of this.groups.querySelectorAll("[aria-current]")) other.removeAttribute("aria-current");
    button.setAttribute("aria-current", "true");
    const turn = this.begin();
    try {
      const sample = await ask(`${this.path}/${group.step}/${group.purpose}/${group.prompt}`);
      if (turn !== this.asked) return;
      show(this.question, true);
      fill(
        this.question,
        sample.question || "(the prompt's text is not in the run's folder)",
        sample.answer === null ? null : h("strong", {}, `\n\nright answer: ${sample.answer}`),
      );
      fill(this.answers, sample.answers.map(answer));
    } catch (error) {
      if (turn !== this.asked) return;
      this.clear();
      say(this.complaint, error.message);
    }
  }
}

function answer(one) {
  const guessed = one.origins.accepted ?? 0;
  return h(
    "article",
    { class: "answer" },
    h(
      "header",
      {},
      h("strong", {}, one.reward === null ? "not scored yet" : `reward ${number(one.reward, 2)}`),
      h("span", {}, `member ${one.member}`),
      h("span", {}, `${count(one.tokens)} tokens in ${seconds(one.seconds)}`),
      h("span", {}, `${count(guessed)} accepted`),
      h("span", {}, `on ${one.worker}`),
      one.stop === "length" ? h("span", {}, "out of room") : null,
      one.error ? h("span", { class: "complaint" }, one.error) : null,
    ),
    h("pre", {}, one.pieces.map(([origin, text]) => (origin && origin !== "plain" ? h("span", { class: origin, title: ORIGINS[origin] }, text) : text))),
  );
}
