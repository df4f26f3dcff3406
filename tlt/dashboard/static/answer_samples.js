// Samples: a prompt and its group's answers side by side, with the origin of each token.

import { get } from "./api.js";
import { card, h, left, replace, setText, show, table } from "./dom.js";
import { count, number, plural, seconds } from "./format.js";
import { ORIGIN_NAMES } from "./names.js";

export class SampleCard {
  constructor(job) {
    this.path = `/api/jobs/${encodeURIComponent(job)}/samples`;
    // whether the user has chosen something, which then stays
    this.chosen = false;
    this.loadedAt = null;
    this.head = null;
    this.isNear = false;
    // only the response to the last request is shown
    this.requests = 0;
    this.batches = h("select", { id: "batch", onchange: () => this.choose() });
    this.groups = h("div", { class: "groups" });
    this.question = h("pre", { class: "question", hidden: true });
    this.answers = h("div", { class: "answers" });
    this.error = h("p", { class: "error", role: "alert" });
    this.element = card(
      "Samples",
      {
        id: "samples",
        wide: true,
        note: [
          h("label", { for: "batch" }, "Batch ", this.batches),
          h("button", { type: "button", onclick: () => this.choose() }, "Reload"),
        ],
      },
      h(
        "div",
        { class: "stack" },
        h(
          "div",
          { class: "legend" },
          Object.entries(ORIGIN_NAMES).map(([origin, name]) => h("span", {}, h("i", { class: `origin-${origin}` }), name)),
        ),
        this.error,
        this.groups,
        this.question,
        this.answers,
      ),
    );
    this.observer = new IntersectionObserver(
      (entries) => {
        this.isNear = entries.at(-1).isIntersecting;
        this.refresh();
      },
      { rootMargin: "200px" },
    );
    this.observer.observe(this.element);
  }

  close() {
    this.observer.disconnect();
  }

  update(head) {
    this.head = head;
    this.refresh();
  }

  // Loads the newest batch when it changes, unless the user has chosen one. The card has to be near the
  // viewport, since the server decodes all answers of a group.
  refresh() {
    const { head } = this;
    if (!this.isNear || this.chosen || !head || head.entries < 3) return;
    const at = `${head.step} ${head.phase} ${head.settled > 0}`;
    if (at !== this.loadedAt) {
      this.loadedAt = at;
      this.load("");
    }
  }

  choose() {
    this.chosen = true;
    this.load(this.batches.value);
  }

  async load(batch) {
    const [purpose, step] = batch ? batch.split(" ") : [];
    const query = batch ? `?step=${step}&purpose=${purpose}` : "";
    await this.request(`${this.path}${query}`, (found) => this.list(found), () => replace(this.groups));
  }

  async request(path, use, fail = () => {}) {
    setText(this.error, "");
    this.requests += 1;
    const request = this.requests;
    try {
      const body = await get(path);
      if (request === this.requests) use(body);
    } catch (error) {
      if (request !== this.requests) return;
      fail();
      this.clear();
      setText(this.error, error.message);
    }
  }

  clear() {
    show(this.question, false);
    replace(this.answers);
  }

  list({ batches, chosen, groups }) {
    if (!chosen) {
      replace(this.groups, h("p", { class: "empty" }, "No answer yet."));
      return;
    }
    const name = ([step, purpose]) => (purpose === "eval" ? `evaluation at step ${step}` : `step ${step}`);
    replace(this.batches, batches.map((each) => h("option", { value: `${each[1]} ${each[0]}` }, name(each))));
    this.batches.value = `${chosen[1]} ${chosen[0]}`;
    const rows = groups.map((group) => [
      h("button", { type: "button", onclick: (event) => this.pick(group, event.target) }, `prompt ${group.prompt}${group.set === null ? "" : ` of ${group.set}`}`),
      count(group.answers),
      number(group.mean, 2),
      group.low === null ? "–" : `${number(group.low, 2)} to ${number(group.high, 2)}`,
      `${count(group.longest)} tokens`,
    ]);
    const caption = `${name(chosen)}: ${plural(groups.length, "group")}`;
    replace(this.groups, table([left("group"), "answers", "mean reward", "from, to", "longest"], rows, { caption }));
    if (groups.length) this.open(groups[0], this.groups.querySelector("button"));
    else this.clear();
  }

  pick(group, button) {
    this.chosen = true;
    this.open(group, button);
  }

  async open(group, button) {
    for (const other of this.groups.querySelectorAll("[aria-current]")) other.removeAttribute("aria-current");
    button.setAttribute("aria-current", "true");
    await this.request(`${this.path}/${group.step}/${group.purpose}/${group.prompt}`, (sample) => this.showSample(sample));
  }

  showSample({ question, answer, answers }) {
    show(this.question, true);
    replace(
      this.question,
      question || "(the prompt's text is not in the run's folder)",
      answer === null ? null : h("strong", {}, `\n\nright answer: ${answer}`),
    );
    replace(this.answers, answers.map(article));
  }
}

function article(answer) {
  return h(
    "article",
    { class: "answer" },
    h(
      "header",
      {},
      h("strong", {}, answer.reward === null ? "not scored yet" : `reward ${number(answer.reward, 2)}`),
      h("span", {}, `member ${answer.member}`),
      h("span", {}, `${count(answer.tokens)} tokens in ${seconds(answer.seconds)}`),
      h("span", {}, `${count(answer.origins.accepted ?? 0)} accepted`),
      h("span", {}, `on ${answer.worker}`),
      answer.stop === "length" ? h("span", {}, "at the token limit") : null,
      answer.stop === "turns" ? h("span", {}, "at the limit of turns") : null,
      answer.error ? h("span", { class: "error" }, answer.error) : null,
    ),
    answer.conversations.length ? said(answer.conversations) : h("pre", {}, answer.pieces.map(piece)),
    answer.conversations.length
      ? h("details", {}, h("summary", {}, answer.conversations.length > 1 ? "tokens of the first conversation" : "tokens"), h("pre", {}, answer.pieces.map(piece)))
      : null,
  );
}

// Shows who said what; an agent may hold several conversations.
function said(conversations) {
  const parts = conversations.flatMap((turns, index) => {
    const first = Math.max(0, turns.findIndex(([role]) => role === "assistant"));
    const [before, after] = [turns.slice(0, first), turns.slice(first)];
    return [
      conversations.length > 1 ? h("h4", {}, `conversation ${index + 1}`) : null,
      before.length ? h("details", {}, h("summary", {}, "what the policy was given"), ...before.map(turn)) : null,
      ...after.map(turn),
    ];
  });
  return h("div", { class: "turns" }, parts);
}

function turn([role, text]) {
  return h("p", { class: `said said-${role}` }, h("strong", {}, role), text);
}

function piece([origin, text]) {
  if (!origin || origin === "plain") return text;
  return h("span", { class: `origin-${origin}`, title: ORIGIN_NAMES[origin] }, text);
}
