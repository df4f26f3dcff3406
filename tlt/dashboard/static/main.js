// The frame: what is shown, whether it is alive, and the keys.

import { ask } from "./api.js";
import { fill, h, say, show } from "./dom.js";
import { Feed } from "./feed.js";
import { JobPage } from "./job_page.js";
import { RunModel } from "./run_model.js";
import { SessionPage } from "./session_page.js";
import { chooseTheme, chosenTheme } from "./theme.js";

const REDRAW_MS = 500;
const STATES = {
  connecting: "connecting",
  live: "live",
  // to the dashboard, while nothing goes on in what is shown
  connected: "connected",
  stale: "nothing heard for a while",
  lost: "disconnected, trying again",
  refused: "nothing to be told",
  paused: "paused while nobody looks",
};

class App {
  constructor(about) {
    this.about = about;
    this.session = null;
    this.run = new RunModel();
    this.page = null;
    this.job = undefined;
    // the section that a link named, until there is something to scroll to
    this.part = null;
    this.dirty = new Set();
    this.scheduled = false;
    this.wasLive = false;
    this.feed = new Feed({
      run: (update) => this.changed(this.run.apply(update)),
      session: (view) => {
        if (view === null) return;
        this.session = view;
        this.changed(["session"]);
      },
      connection: (state) => this.connected(state),
    });
    this.frame();
    addEventListener("hashchange", () => this.go());
    addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("visibilitychange", () => this.draw());
    setInterval(() => this.tick(), REDRAW_MS);
    this.go();
  }

  frame() {
    this.where = h("span", { class: "where" });
    this.connection = h("span", { class: "connection", role: "status" });
    this.banner = h("div", { class: "banner", role: "alert", hidden: true });
    this.main = h("main", { id: "main", tabindex: "-1" });
    this.theme = h("button", { type: "button", onclick: () => this.nextTheme() });
    this.jump = h("nav", { class: "jump", "aria-label": "Sections" });
    this.nextTheme(chosenTheme());
    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault();
      this.main.focus();
    });
    fill(
      document.querySelector("#app"),
      h(
        "header",
        { class: "bar" },
        h("a", { class: "brand", href: this.about.run ? `#/job/${this.about.run}` : "#/" }, "TLT"),
        this.where,
        h("span", { class: "space" }),
        this.connection,
        this.theme,
      ),
      this.banner,
      this.jump,
      this.main,
    );
  }

  nextTheme(name) {
    const order = ["auto", "light", "dark"];
    const next = name ?? order[(order.indexOf(chosenTheme()) + 1) % order.length];
    if (name === undefined) chooseTheme(next);
    say(this.theme, { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[next]);
    this.theme.setAttribute("aria-label", `Colours: ${next}`);
  }

  go() {
    const place = placeOf(location.hash);
    if (place === null && this.page !== null) return;
    const wanted = place?.job ?? this.about.run;
    this.part = place?.part ?? null;
    if (wanted !== this.job) this.open(wanted);
    else if (this.page.ready) this.arrive("auto");
  }

  scroll(id, behavior = "auto") {
    document.getElementById(id)?.scrollIntoView({ behavior });
  }

  arrive(behavior) {
    if (this.part !== null) this.scroll(this.part, behavior);
    this.part = null;
  }

  open(job) {
    this.page?.close();
    this.job = job;
    this.run.clear();
    document.title = job === null ? "TLT" : `${job} · TLT`;
    const links = [];
    if (this.about.session) links.push(h("a", { href: "#/" }, `session ${this.about.session}`));
    if (job !== null) links.push(h("strong", {}, job));
    fill(this.where, links.flatMap((link, index) => (index ? [" › ", link] : [link])));
    this.page = job === null ? new SessionPage(this) : new JobPage(this, job);
    fill(this.main, this.page.element);
    const sections = this.page.sections ?? [];
    show(this.jump, sections.length > 0);
    fill(
      this.jump,
      sections.map(([id, name]) =>
        h("a", { href: `#/job/${encodeURIComponent(job)}/${id}`, onclick: () => this.scroll(id) }, name),
      ),
    );
    this.feed.open(job);
    this.changed(["session"]);
    scrollTo({ top: 0, behavior: "instant" });
  }

  connected(state) {
    document.body.dataset.connection = state;
    this.run.connected = state === "live";
    this.tellConnection();
    this.banner.dataset.state = state;
    show(this.banner, ["lost", "stale", "refused"].includes(state) && !this.isMissing);
    say(
      this.banner,
      {
        lost: "The dashboard does not answer. What is shown is how it was; jobs run on without it.",
        stale: "Nothing was heard from the dashboard for a while. What is shown may be old.",
        refused: `The dashboard cannot tell: ${this.feed.refused?.why}. What is shown is how it was.`,
      }[state] ?? "",
    );
    if (state === "refused") this.changed(["session"]);
  }

  tellConnection() {
    const state = this.run.connected && this.run.still ? "connected" : document.body.dataset.connection;
    this.connection.dataset.state = state;
    say(this.connection, STATES[state]);
  }

  // There is no such job.
  get isMissing() {
    return this.feed.refused?.status === 404;
  }

  // Until it was heard of, it is taken to be.
  get sessionIsUp() {
    return this.about.session !== null && (this.session?.up ?? true);
  }

  changed(names) {
    for (const name of names) this.dirty.add(name);
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => {
      this.scheduled = false;
      this.draw();
    });
  }

  draw() {
    if (document.hidden || !this.page) return;
    const dirty = this.dirty;
    this.dirty = new Set();
    this.page.update(dirty);
    this.tellConnection();
    if (this.page.ready) this.arrive("instant");
  }

  // Time passes on the lanes, whether or not something was told.
  tick() {
    if (document.hidden || !this.run.connected) return;
    const { live } = this.run;
    // once more when it is taken to be over
    if (live || this.wasLive) this.page.update(new Set(["time"]));
    this.tellConnection();
    this.wasLive = live;
  }

  key(event) {
    const typing = event.target.closest?.("input, textarea, select, dialog, [role=application]");
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "t") this.nextTheme();
    else if (event.key === "j" && this.about.session) location.hash = "#/";
    else if (/^[0-9]$/.test(event.key)) this.jump.querySelectorAll("a")[(Number(event.key) + 9) % 10]?.click();
  }
}

// The job and the section that an address names; null where it names none of ours.
function placeOf(hash) {
  if (["", "#", "#/"].includes(hash)) return { job: null, part: null };
  const [, job, part] = hash.match(/^#\/job\/([^/]+)(?:\/(.*))?$/) ?? [];
  if (job === undefined) return null;
  try {
    return { job: decodeURIComponent(job), part: part || null };
  } catch {
    return null;
  }
}

ask("/api/about").then(
  (about) => new App(about),
  (error) => fill(document.querySelector("#app"), h("p", { class: "boot" }, error.message)),
);
