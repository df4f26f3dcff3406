// One job: where the time goes, the tail, speculation, learning, the drafter, samples, the log.

import { change } from "./api.js";
import { ask as question } from "./confirm_dialog.js";
import { card, fill, h, renew, say, show } from "./dom.js";
import { count, number, plural, seconds, when } from "./format.js";
import { advice } from "./advice.js";
import { AttemptsCard } from "./attempts.js";
import { DrafterCards } from "./drafter.js";
import { Lanes } from "./lanes.js";
import { LearningCard } from "./learning_charts.js";
import { LogCard } from "./log.js";
import { ENDED } from "./run_model.js";
import { SampleCard } from "./samples.js";
import { SpeculationCard } from "./speculation.js";
import { StreamsCard } from "./stream_health.js";
import { TailCard } from "./rollout_tail.js";
import { TimesCard } from "./time_by_duty.js";

const EVERYTHING = ["head", "tail", "speculation", "learning", "times", "drafter", "attempts", "advice", "lanes", "lines", "session"];

export class JobPage {
  constructor(app, job) {
    this.app = app;
    this.job = job;
    this.figures = new Figures();
    this.lanes = new Lanes(app.run.lanes);
    this.tail = new TailCard();
    this.speculation = new SpeculationCard();
    this.learning = new LearningCard();
    this.drafter = new DrafterCards();
    this.times = new TimesCard();
    this.attempts = new AttemptsCard();
    this.streams = app.about.session ? new StreamsCard() : null;
    this.samples = new SampleCard(job);
    this.log = new LogCard();
    this.advice = h("ul", { class: "advice" });
    this.adviceCard = card("Warnings", { id: "warnings", wide: true }, this.advice);
    const cancel = () => h("button", { type: "button", class: "danger", onclick: () => this.askCancel() }, "Cancel the job");
    this.cancel = cancel();
    this.cancelWaiting = cancel();
    this.ready = false;
    this.live = false;
    this.spec = h("button", { type: "button", onclick: () => this.showSpec() }, "Spec");
    this.status = h("span", { class: "chip" });
    this.complaint = h("p", { class: "complaint", role: "alert" });
    // of all that moves the one thing that is read out
    this.spoken = h("p", { class: "unseen", role: "status" });
    const head = card(
      "Job",
      { id: "job", wide: true, note: [this.status, h("span", { class: "space" }), this.spec, this.cancel] },
      this.figures.element,
      this.complaint,
      this.spoken,
    );
    this.loading = h("div", { class: "loading", role: "status" });
    this.grid = h(
      "div",
      { class: "grid", hidden: true },
      head,
      this.adviceCard,
      this.lanes.card,
      this.tail.element,
      this.speculation.element,
      this.learning.element,
      this.drafter.element,
      this.times.element,
      this.streams?.element,
      this.samples.element,
      this.attempts.element,
      this.log.element,
    );
    this.element = h("div", {}, this.loading, this.grid);
    this.sections = [
      ["lanes", "Workers"],
      ["tail", "Tail"],
      ["speculation", "Speculation"],
      ["learning", "Learning"],
      ["drafter", "Drafter"],
      ["times", "Time"],
      ...(this.streams ? [["streams", "Health"]] : []),
      ["samples", "Samples"],
      ["attempts", "Attempts"],
      ["log", "Log"],
    ];
  }

  close() {
    for (const part of [this.lanes, this.tail, this.speculation, this.learning, this.drafter, this.samples]) part.close();
  }

  update(changed) {
    const run = this.app.run;
    const record = this.app.session?.jobs.find((each) => each.job === this.job);
    run.attended = this.app.sessionIsUp && (record?.status ?? "running") === "running";
    const ready = run.head !== null && !this.app.isMissing && (run.head.began !== null || ENDED.includes(record?.status));
    show(this.grid, ready);
    show(this.loading, !ready);
    if (!ready) {
      this.ready = false;
      this.tellLoading(run, record);
      return;
    }
    // what was told while nothing was shown, or is now told in other words
    if (!this.ready || this.live !== run.live) changed = new Set(EVERYTHING);
    this.ready = true;
    this.live = run.live;
    const told = record?.status ?? run.head.status;
    const status = told === "running" && !run.live && run.open ? "no end" : told;
    say(this.status, status);
    this.status.dataset.status = status;
    say(this.spoken, `${status}: ${run.head.phase}, step ${run.head.step} of ${run.head.steps}`);
    show(this.cancel, this.app.about.may_change && !ENDED.includes(status));
    if (changed.has("head") || changed.has("time")) this.figures.update(run);
    if (changed.has("advice") || changed.has("session")) this.tellAdvice(run, record);
    if (changed.has("lanes") || changed.has("time") || changed.has("head")) this.lanes.update(run);
    if (changed.has("tail")) this.tail.update(run.tail, run, this.app.sessionIsUp);
    if (changed.has("speculation") || changed.has("times")) this.speculation.update(run.speculation, run.times);
    if (changed.has("learning")) this.learning.update(run.learning);
    if (changed.has("drafter")) this.drafter.update(run.drafter);
    if (changed.has("times")) this.times.update(run.times);
    if (changed.has("attempts")) this.attempts.update(run.attempts);
    if (changed.has("session") && this.streams) this.streams.update(this.app.session);
    if (changed.has("lines")) this.log.update(run.lines);
    if (changed.has("tail") || changed.has("learning")) this.samples.update(run.head);
  }

  tellLoading(run, record) {
    const waits = record && ["queued", "preparing"].includes(record.status);
    if (this.app.isMissing) {
      const elsewhere = this.app.about.session ? "The session's jobs" : `The run '${this.app.about.run}'`;
      renew(this.loading, h("p", {}, h("strong", {}, `There is no job '${this.job}'. `), h("a", { href: "#/" }, elsewhere)));
    } else if (run.broken) {
      fill(this.loading, h("p", {}, `The journal cannot be read: ${run.broken}`));
    } else if (waits || (run.head && run.head.began === null)) {
      const why = {
        queued: "It waits for the job before it; nothing has to be done.",
        preparing: "Model, data and reward are being checked.",
      }[this.app.sessionIsUp && record?.status];
      renew(
        this.loading,
        h("p", {}, h("strong", {}, `${this.job} is ${record?.status ?? "not started"}. `), why ?? "Its journal is empty."),
        h("ul", { class: "advice" }, this.app.session ? advice(this.app.session.advice) : []),
        this.cancelWaiting,
      );
      show(this.cancelWaiting, this.app.about.may_change && waits);
    } else {
      renew(
        this.loading,
        h("p", {}, run.reading ? `Reading the journal: ${Math.round(100 * run.reading)} %` : "Loading …"),
        h("progress", run.reading ? { value: run.reading, max: 1 } : {}),
      );
    }
  }

  tellAdvice(run, record) {
    const ofSession = run.open && this.app.session ? this.app.session.advice : [];
    const all = [...ofSession, ...(run.advice ?? [])];
    if (run.broken) all.unshift({ urgency: 0, what: run.broken, do: "The journal was read again from its beginning." });
    if (record?.error && run.head.status !== "failed") {
      all.unshift({ urgency: 0, what: `The job ${record.status}: ${record.error}`, do: "Mend what is named, and submit it again." });
    }
    show(this.adviceCard, all.length > 0);
    renew(this.advice, advice(all));
  }

  async askCancel() {
    const sure = await question(
      `Cancel ${this.job}?`,
      "It ends now. What it has committed stays in its folder: checkpoints, the best policy, the drafter.",
      "Cancel the job",
    );
    if (!sure) return;
    say(this.complaint, "");
    this.cancel.disabled = true;
    try {
      await change(`/api/jobs/${encodeURIComponent(this.job)}/cancel`);
    } catch (error) {
      say(this.complaint, error.message);
    } finally {
      this.cancel.disabled = false;
    }
  }

  async showSpec() {
    say(this.complaint, "");
    try {
      const { showSpec } = await import("./spec_dialogs.js");
      await showSpec(this.job);
    } catch (error) {
      say(this.complaint, error.message);
    }
  }
}

class Figures {
  constructor() {
    this.parts = {};
    const make = (name, label) => {
      const value = h("dd");
      this.parts[name] = value;
      return h("div", { class: "figure" }, h("dt", {}, label), value);
    };
    this.progress = h("progress", { max: "1", "aria-label": "steps done" });
    this.element = h(
      "dl",
      { class: "figures" },
      make("step", "Step"),
      make("phase", "At"),
      make("round", "Answers of this round"),
      make("speed", "Tokens written"),
      make("time", "Time"),
      make("workers", "Workers"),
    );
    this.parts.step.parentElement.append(this.progress);
  }

  update(run) {
    const head = run.head;
    const set = (name, value, note) => renew(this.parts[name], value, note ? h("small", {}, note) : null);
    set("step", `${count(head.step)} of ${count(head.steps)}`, `policy ${head.version}`);
    this.progress.value = head.step / head.steps;
    set("phase", head.phase, run.open && run.quiet > 5 ? `last entry ${seconds(run.quiet)} ago` : null);
    set(
      "round",
      head.expected ? `${count(head.settled)} of ${count(head.expected)}` : "–",
      head.expected ? "scored" : "no round is open",
    );
    set("speed", speed(head.tokens_per_second), run.live ? "over 10 s" : "over its last 10 s");
    set("time", seconds(run.live ? run.now : head.seconds), head.began ? `began ${when(head.began)}` : null);
    const away = head.duties.away ?? 0;
    set(
      "workers",
      count(head.workers),
      away ? `${away} away` : head.losses ? `${plural(head.losses, "loss", "losses")} so far` : "none lost",
    );
  }
}

function speed(tokens) {
  return tokens === null ? "–" : `${tokens < 100 ? number(tokens, 1) : count(tokens)} /s`;
}
