// The session: its jobs, its workers, and how its streams are.

import { advice } from "./advice.js";
import { change } from "./api.js";
import { ask as question } from "./confirm_dialog.js";
import { card, h, renew, say, show, table } from "./dom.js";
import { ago, count } from "./format.js";
import { ENDED } from "./run_model.js";
import { StreamsCard } from "./stream_health.js";

export class SessionPage {
  constructor(app) {
    this.app = app;
    this.streams = new StreamsCard();
    this.jobs = h("div");
    this.sum = h("p", { class: "hint" });
    this.complaint = h("p", { class: "complaint", role: "alert" });
    this.advice = h("ul", { class: "advice" });
    this.adviceCard = card("Warnings", { wide: true }, this.advice);
    this.submit = h("button", { type: "button", class: "primary", onclick: () => this.openSubmit() }, "Submit a job");
    const reader = app.about.may_change
      ? null
      : h("p", { class: "hint" }, "You look only: to submit and cancel, open the address with the token that tlt printed.");
    show(this.submit, app.about.may_change);
    this.grid = h(
      "div",
      { class: "grid", hidden: true },
      this.adviceCard,
      card("Jobs", { wide: true, note: [h("span", { class: "space" }), this.submit] }, h("div", { class: "stack" }, this.sum, reader, this.complaint, this.jobs)),
      this.streams.element,
    );
    this.loading = h("p", { class: "loading" }, "Asking the session …");
    this.element = h("div", {}, this.loading, this.grid);
  }

  close() {}

  update(changed) {
    const session = this.app.session;
    if (!session || !changed.has("session")) return;
    show(this.loading, false);
    show(this.grid, true);
    const all = session.advice;
    show(this.adviceCard, all.length > 0);
    renew(this.advice, advice(all));
    say(this.sum, `Redis ${session.redis}; runs in ${session.runs}; device ${session.device}.`);
    this.streams.update(session);
    const focused = document.activeElement?.dataset?.key;
    renew(this.jobs, this.list(session));
    if (document.activeElement?.dataset?.key === focused) return;
    // its row has moved
    this.jobs.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  list(session) {
    const rows = session.jobs.map((each) => [
      h("a", { href: `#/job/${encodeURIComponent(each.job)}`, data: { key: each.job } }, each.job),
      h("span", { class: "chip", data: { status: each.status } }, each.status),
      each.error ?? "",
      count(each.steps),
      each.attempts ? count(each.attempts) : "–",
      each.attempts ? count(each.losses) : "–",
      ago(each.submitted),
      this.app.about.may_change && !ENDED.includes(each.status)
        ? h("button", { type: "button", class: "danger", data: { key: `cancel ${each.job}` }, onclick: () => this.cancel(each.job) }, "Cancel")
        : "",
    ]);
    return table(
      [{ name: "job", left: true }, { name: "state", left: true }, { name: "error", left: true }, { name: "steps" }, { name: "attempts" }, { name: "workers lost" }, { name: "submitted" }, { name: "" }],
      rows,
      {
        caption: session.older_jobs ? `the newest; ${count(session.older_jobs)} older ones: tlt jobs` : undefined,
        empty: "No job yet. `tlt submit configs/tiny-reasoner.yaml` queues one, or the button above.",
      },
    );
  }

  async cancel(job) {
    const sure = await question(`Cancel ${job}?`, "It ends now; what it has committed stays in its folder.", "Cancel the job");
    if (!sure) return;
    say(this.complaint, "");
    try {
      await change(`/api/jobs/${encodeURIComponent(job)}/cancel`);
    } catch (error) {
      say(this.complaint, error.message);
    }
  }

  async openSubmit() {
    const { submitSpec } = await import("./spec_dialogs.js");
    await submitSpec(this.app.session?.jobs ?? []);
  }
}
