// The page of a job: workers, tail, speculation, learning, drafter, times, samples, log.

import { AdviceCard, adviceItems } from "./advice.js";
import { SampleCard } from "./answer_samples.js";
import { AttemptsCard } from "./attempts.js";
import { cancelJob, pauseJob } from "./dialogs.js";
import { card, h, replace, replaceChanged, setText, show } from "./dom.js";
import { DrafterCard } from "./drafter.js";
import { words } from "./format.js";
import { JobFigures } from "./job_figures.js";
import { LogCard } from "./job_log.js";
import { LanesView } from "./lanes_view.js";
import { LearningCard } from "./learning_charts.js";
import { TailCard } from "./rollout_tail.js";
import { ENDED } from "./run_model.js";
import { SpeculationCard } from "./speculation.js";
import { StreamsCard } from "./session_health.js";
import { TimesCard } from "./time_by_duty.js";

const EVERYTHING = ["head", "tail", "speculation", "learning", "times", "drafter", "attempts", "advice", "lanes", "logLines", "session"];

export class JobPage {
  constructor(app, job) {
    this.app = app;
    this.job = job;
    this.ready = false;
    this.live = false;
    this.lanes = new LanesView(app.run.lanes);
    this.tail = new TailCard();
    this.speculation = new SpeculationCard();
    this.learning = new LearningCard();
    this.drafter = new DrafterCard();
    this.times = new TimesCard();
    this.attempts = new AttemptsCard();
    this.streams = app.about.session ? new StreamsCard() : null;
    this.samples = new SampleCard(job);
    this.log = new LogCard();
    this.advice = new AdviceCard();
    this.loading = h("div", { class: "loading", role: "status" });
    this.grid = h(
      "div",
      { class: "grid", hidden: true },
      this.makeHead(),
      this.advice.element,
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

  makeHead() {
    const cancelButton = () => h("button", { type: "button", class: "danger", onclick: (event) => this.cancel(event.target) }, "Cancel the job");
    this.cancelButton = cancelButton();
    this.cancelQueuedButton = cancelButton();
    this.pauseButton = h("button", { type: "button", onclick: (event) => this.pause(event.target) }, "Pause");
    this.specButton = h("button", { type: "button", onclick: () => this.showSpec() }, "Spec");
    this.status = h("span", { class: "chip" });
    this.figures = new JobFigures();
    this.error = h("p", { class: "error", role: "alert" });
    // the only part that screen readers announce when it changes
    this.announced = h("p", { class: "visually-hidden", role: "status" });
    const note = [this.status, h("span", { class: "space" }), this.specButton, this.pauseButton, this.cancelButton];
    return card("Job", { id: "job", wide: true, note }, this.figures.element, this.error, this.announced);
  }

  close() {
    for (const part of [this.lanes, this.tail, this.speculation, this.learning, this.drafter, this.samples]) part.close();
  }

  update(changed) {
    const run = this.app.run;
    const record = this.app.session?.jobs.find((each) => each.job === this.job);
    run.followed = this.app.sessionIsUp && (record?.status ?? "running") === "running";
    const ready = run.head !== null && !this.app.isMissing && (run.head.began !== null || ENDED.includes(record?.status));
    show(this.grid, ready);
    show(this.loading, !ready);
    if (!ready) {
      this.ready = false;
      this.updateLoading(run, record);
      return;
    }
    // changes that came while the page was not ready, and words that depend on whether the run is live
    if (!this.ready || this.live !== run.live) changed = new Set(EVERYTHING);
    this.ready = true;
    this.live = run.live;
    this.updateStatus(run, record);
    const has = (...names) => names.some((name) => changed.has(name));
    if (has("head", "time")) this.figures.update(run);
    if (has("advice", "session")) this.updateAdvice(run, record);
    if (has("lanes", "time", "head")) this.lanes.update(run);
    if (has("tail")) this.tail.update(run.tail, run, this.app.sessionIsUp);
    if (has("speculation", "times")) this.speculation.update(run.speculation, run.times);
    if (has("learning")) this.learning.update(run.learning);
    if (has("drafter")) this.drafter.update(run.drafter);
    if (has("times")) this.times.update(run.times);
    if (has("attempts")) this.attempts.update(run.attempts);
    if (has("session")) this.streams?.update(this.app.session);
    if (has("logLines")) this.log.update(run.logLines);
    if (has("tail", "learning")) this.samples.update(run.head);
  }

  updateStatus(run, record) {
    const known = record?.status ?? run.head.status;
    const status = known === "running" && !run.live && run.open ? "no end" : known;
    setText(this.status, status);
    this.status.dataset.status = status;
    setText(this.announced, `${status}: ${words(run.head.phase)}, step ${run.head.step} of ${run.head.steps}`);
    const mayChange = this.app.about.may_change && !ENDED.includes(status);
    show(this.cancelButton, mayChange);
    show(this.pauseButton, mayChange);
    this.isPaused = status === "paused";
    setText(this.pauseButton, this.isPaused ? "Resume" : "Pause");
  }

  updateLoading(run, record) {
    const isQueued = record && ["queued", "preparing", "paused"].includes(record.status);
    if (this.app.isMissing) {
      const elsewhere = this.app.about.session ? "The session's jobs" : `The run '${this.app.about.run}'`;
      replaceChanged(this.loading, h("p", {}, h("strong", {}, `There is no job '${this.job}'. `), h("a", { href: "#/" }, elsewhere)));
    } else if (run.broken) {
      replace(this.loading, h("p", {}, `The journal cannot be read: ${run.broken}`));
    } else if (isQueued || (run.head && run.head.began === null)) {
      const why = {
        queued: "It waits for the job before it; nothing has to be done.",
        preparing: "Model, data and reward are being checked.",
        paused: record?.pause,
      }[this.app.sessionIsUp && record?.status];
      replaceChanged(
        this.loading,
        h("p", {}, h("strong", {}, `${this.job} is ${record?.status ?? "not started"}. `), why ?? "Its journal is empty."),
        h("ul", { class: "advice" }, this.app.session ? adviceItems(this.app.session.advice) : []),
        this.cancelQueuedButton,
      );
      show(this.cancelQueuedButton, this.app.about.may_change && isQueued);
    } else {
      replaceChanged(
        this.loading,
        h("p", {}, run.reading ? `Reading the journal: ${Math.round(100 * run.reading)} %` : "Loading …"),
        h("progress", run.reading ? { value: run.reading, max: 1 } : {}),
      );
    }
  }

  updateAdvice(run, record) {
    const ofSession = run.open && this.app.session ? this.app.session.advice : [];
    const all = [...ofSession, ...(run.advice ?? [])];
    if (run.broken) all.unshift({ urgency: 0, problem: run.broken, remedy: "The journal was read again from its beginning." });
    if (record?.error && run.head.status !== "failed") {
      all.unshift({ urgency: 0, problem: `The job ${record.status}: ${record.error}`, remedy: "Fix the cause and submit it again." });
    }
    if (record?.pause) all.unshift({ urgency: 1, problem: `The job is ${record.pause}`, remedy: "Nothing is lost: it goes on where it was." });
    this.advice.update(all);
  }

  async pause(button) {
    button.disabled = true;
    await pauseJob(this.job, this.isPaused, this.error);
    button.disabled = false;
  }

  async cancel(button) {
    button.disabled = true;
    await cancelJob(this.job, this.error);
    button.disabled = false;
  }

  async showSpec() {
    setText(this.error, "");
    try {
      const { showSpec } = await import("./spec_dialogs.js");
      await showSpec(this.job);
    } catch (error) {
      setText(this.error, error.message);
    }
  }
}
