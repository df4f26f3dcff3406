// The page of a session: its jobs, its workers, and the health of its streams.

import { AdviceCard } from "./advice.js";
import { cancelJob, pauseJob } from "./dialogs.js";
import { Table, card, h, left, setText, show } from "./dom.js";
import { ago, count } from "./format.js";
import { ENDED } from "./run_model.js";
import { StreamsCard } from "./session_health.js";

export class SessionPage {
  constructor(app) {
    this.app = app;
    this.streams = new StreamsCard();
    this.jobs = new Table([left("job"), left("state"), left("workers"), left("why"), "steps", "attempts", "workers lost", "submitted", ""], {
      empty: "No job yet. `tlt submit configs/tiny-reasoner.yaml` queues one, or the button above.",
    });
    this.summary = h("p", { class: "hint" });
    this.error = h("p", { class: "error", role: "alert" });
    this.advice = new AdviceCard();
    this.submit = h("button", { type: "button", class: "primary", onclick: () => this.openSubmit() }, "Submit a job");
    const readOnly = app.about.may_change
      ? null
      : h("p", { class: "hint" }, "This page is read-only: to submit, pause and cancel, open the address with the token that tlt printed.");
    show(this.submit, app.about.may_change);
    this.grid = h(
      "div",
      { class: "grid", hidden: true },
      this.advice.element,
      card(
        "Jobs",
        { wide: true, note: [h("span", { class: "space" }), this.submit] },
        h("div", { class: "stack" }, this.summary, readOnly, this.error, this.jobs.element),
      ),
      this.streams.element,
    );
    this.loading = h("p", { class: "loading" }, "Loading the session …");
    this.element = h("div", {}, this.loading, this.grid);
  }

  close() {}

  update(changed) {
    const session = this.app.session;
    if (!session || !changed.has("session")) return;
    show(this.loading, false);
    show(this.grid, true);
    this.advice.update(session.advice);
    setText(this.summary, `Redis ${session.redis}; runs in ${session.runs}; device ${session.device}.`);
    this.streams.update(session);
    const focused = document.activeElement?.dataset?.key;
    this.jobs.caption = session.older_jobs ? `the newest; ${count(session.older_jobs)} older ones: tlt jobs` : null;
    this.jobs.update(session.jobs.map((job) => this.row(job)));
    if (document.activeElement?.dataset?.key === focused) return;
    // the focused row has moved
    this.jobs.element.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  row(each) {
    const cancel = () =>
      h("button", { type: "button", class: "danger", data: { key: `cancel ${each.job}` }, onclick: () => cancelJob(each.job, this.error) }, "Cancel");
    const isPaused = each.status === "paused";
    const pause = () =>
      h("button", { type: "button", data: { key: `pause ${each.job}` }, onclick: () => pauseJob(each.job, isPaused, this.error) }, isPaused ? "Resume" : "Pause");
    const mayChange = this.app.about.may_change && !ENDED.includes(each.status);
    return [
      h("a", { href: `#/job/${encodeURIComponent(each.job)}`, data: { key: each.job } }, each.job),
      h("span", { class: "chip", data: { status: each.status } }, each.status),
      each.workers,
      each.error ?? each.pause ?? each.wait ?? "",
      count(each.steps),
      each.attempts ? count(each.attempts) : "–",
      each.attempts ? count(each.losses) : "–",
      ago(each.submitted),
      mayChange ? h("span", { class: "buttons" }, pause(), cancel()) : "",
    ];
  }

  async openSubmit() {
    const { submitSpec } = await import("./spec_dialogs.js");
    await submitSpec(this.app.session?.jobs ?? []);
  }
}
