// The frame of the page: navigation, connection state, keys.

import { get } from "./api.js";
import { h, replace, setText, show } from "./dom.js";
import { Feed } from "./feed.js";
import { JobPage } from "./job_page.js";
import { RunModel } from "./run_model.js";
import { SessionPage } from "./session_page.js";
import { chooseTheme, chosenTheme } from "./theme.js";

const REDRAW_MS = 500;
const STATES = {
  connecting: "connecting",
  live: "live",
  // to the dashboard, while the run is not live
  connected: "connected",
  stale: "no data for a while",
  lost: "disconnected, retrying",
  refused: "refused",
  paused: "paused while hidden",
};

class App {
  constructor(about) {
    this.about = about;
    this.session = null;
    this.run = new RunModel();
    this.page = null;
    this.job = undefined;
    // the section that a link names, until the page is ready to scroll to it
    this.pendingSection = null;
    this.changedParts = new Set();
    this.scheduled = false;
    this.wasLive = false;
    this.feed = new Feed({
      run: (update) => this.scheduleDraw(this.run.apply(update)),
      session: (view) => {
        if (view === null) return;
        this.session = view;
        this.scheduleDraw(["session"]);
      },
      connection: (state) => this.showConnection(state),
    });
    this.makeFrame();
    addEventListener("hashchange", () => this.navigate());
    addEventListener("keydown", (event) => this.onKey(event));
    document.addEventListener("visibilitychange", () => this.draw());
    setInterval(() => this.tick(), REDRAW_MS);
    this.navigate();
  }

  makeFrame() {
    this.breadcrumb = h("span", { class: "breadcrumb" });
    this.connection = h("span", { class: "connection", role: "status" });
    this.banner = h("div", { class: "banner", role: "alert", hidden: true });
    this.main = h("main", { id: "main", tabindex: "-1" });
    this.theme = h("button", { type: "button", onclick: () => this.nextTheme() });
    this.sectionLinks = h("nav", { class: "section-links", "aria-label": "Sections" });
    this.nextTheme(chosenTheme());
    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault();
      this.main.focus();
    });
    replace(
      document.querySelector("#app"),
      h(
        "header",
        { class: "bar" },
        h("a", { class: "brand", href: this.about.run ? `#/job/${this.about.run}` : "#/" }, "TLT"),
        this.breadcrumb,
        h("span", { class: "space" }),
        this.connection,
        this.theme,
      ),
      this.banner,
      this.sectionLinks,
      this.main,
    );
  }

  nextTheme(name) {
    const order = ["auto", "light", "dark"];
    const next = name ?? order[(order.indexOf(chosenTheme()) + 1) % order.length];
    if (name === undefined) chooseTheme(next);
    setText(this.theme, { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[next]);
    this.theme.setAttribute("aria-label", `Colours: ${next}`);
  }

  navigate() {
    const target = parseHash(location.hash);
    if (target === null && this.page !== null) return;
    const job = target?.job ?? this.about.run;
    this.pendingSection = target?.section ?? null;
    if (job !== this.job) this.open(job);
    else if (this.page.ready) this.scrollToPending("auto");
  }

  scrollTo(id, behavior = "auto") {
    document.getElementById(id)?.scrollIntoView({ behavior });
  }

  scrollToPending(behavior) {
    if (this.pendingSection !== null) this.scrollTo(this.pendingSection, behavior);
    this.pendingSection = null;
  }

  open(job) {
    this.page?.close();
    this.job = job;
    this.run.clear();
    document.title = job === null ? "TLT" : `${job} · TLT`;
    const links = [];
    if (this.about.session) links.push(h("a", { href: "#/" }, `session ${this.about.session}`));
    if (job !== null) links.push(h("strong", {}, job));
    replace(this.breadcrumb, links.flatMap((link, index) => (index ? [" › ", link] : [link])));
    this.page = job === null ? new SessionPage(this) : new JobPage(this, job);
    replace(this.main, this.page.element);
    const sections = this.page.sections ?? [];
    show(this.sectionLinks, sections.length > 0);
    replace(
      this.sectionLinks,
      sections.map(([id, name]) =>
        h("a", { href: `#/job/${encodeURIComponent(job)}/${id}`, onclick: () => this.scrollTo(id) }, name),
      ),
    );
    this.feed.open(job);
    this.scheduleDraw(["session"]);
    scrollTo({ top: 0, behavior: "instant" });
  }

  showConnection(state) {
    document.body.dataset.connection = state;
    this.run.connected = state === "live";
    this.updateConnection();
    this.banner.dataset.state = state;
    show(this.banner, ["lost", "stale", "refused"].includes(state) && !this.isMissing);
    setText(
      this.banner,
      {
        lost: "The dashboard does not answer. This page shows the last known state; jobs run on without it.",
        stale: "The dashboard has sent nothing for a while. This page may be out of date.",
        refused: `The dashboard refused: ${this.feed.refused?.why}. This page shows the last known state.`,
      }[state] ?? "",
    );
    if (state === "refused") this.scheduleDraw(["session"]);
  }

  updateConnection() {
    const state = this.run.connected && this.run.stopped ? "connected" : document.body.dataset.connection;
    this.connection.dataset.state = state;
    setText(this.connection, STATES[state]);
  }

  // The job does not exist.
  get isMissing() {
    return this.feed.refused?.status === 404;
  }

  // True until the session says otherwise.
  get sessionIsUp() {
    return this.about.session !== null && (this.session?.up ?? true);
  }

  scheduleDraw(parts) {
    for (const part of parts) this.changedParts.add(part);
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.draw();
    });
  }

  draw() {
    if (document.hidden || !this.page) return;
    const changed = this.changedParts;
    this.changedParts = new Set();
    this.page.update(changed);
    this.updateConnection();
    if (this.page.ready) this.scrollToPending("instant");
  }

  // Moves the time on, with or without updates.
  tick() {
    if (document.hidden || !this.run.connected) return;
    const { live } = this.run;
    // once more when it is over
    if (live || this.wasLive) this.page.update(new Set(["time"]));
    this.updateConnection();
    this.wasLive = live;
  }

  onKey(event) {
    const typing = event.target.closest?.("input, textarea, select, dialog, [role=application]");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "t") this.nextTheme();
    else if (event.key === "j" && this.about.session) location.hash = "#/";
    else if (/^[0-9]$/.test(event.key)) this.sectionLinks.querySelectorAll("a")[(Number(event.key) + 9) % 10]?.click();
  }
}

// Returns the job and the section that a hash names, or null for any other hash.
function parseHash(hash) {
  if (["", "#", "#/"].includes(hash)) return { job: null, section: null };
  const [, job, section] = hash.match(/^#\/job\/([^/]+)(?:\/(.*))?$/) ?? [];
  if (job === undefined) return null;
  try {
    return { job: decodeURIComponent(job), section: section || null };
  } catch {
    return null;
  }
}

get("/api/about").then(
  (about) => new App(about),
  (error) => replace(document.querySelector("#app"), h("p", { class: "startup" }, error.message)),
);
