// What the server tells, and whether it still does. The browser comes back by itself, and says
// with Last-Event-ID how far it was told. A page that nobody sees gives its connection back: a
// browser has six to an address, over all its windows.

import { refusal } from "./api.js";

const STALE_SECONDS = 12;
const RETRY_SECONDS = 3;
const UNSEEN_SECONDS = 2;

export class Feed {
  constructor({ run, session, connection }) {
    this.listeners = { run, session, connection };
    this.state = null;
    this.url = null;
    this.source = null;
    this.refused = null;
    this.heard = 0;
    this.tried = 0;
    this.leaving = null;
    this.timer = setInterval(() => this.look(), 1000);
    document.addEventListener("visibilitychange", () => this.turn());
  }

  open(job) {
    this.url = `/api/events${job === null ? "" : `?job=${encodeURIComponent(job)}`}`;
    this.refused = null;
    if (document.hidden) this.pause();
    else this.resume();
  }

  resume() {
    this.become("connecting");
    this.connect();
  }

  pause() {
    this.source?.close();
    this.source = null;
    this.become("paused");
  }

  turn() {
    clearTimeout(this.leaving);
    if (document.hidden) this.leaving = setTimeout(() => this.pause(), 1000 * UNSEEN_SECONDS);
    else if (this.source === null && this.url !== null) this.resume();
  }

  connect() {
    this.source?.close();
    this.tried = performance.now();
    const source = new EventSource(this.url);
    this.source = source;
    source.addEventListener("session", (event) => this.told(() => this.listeners.session(JSON.parse(event.data))));
    source.addEventListener("run", (event) => this.told(() => this.listeners.run(JSON.parse(event.data))));
    source.addEventListener("heartbeat", () => this.told(() => {}));
    source.addEventListener("open", () => this.told(() => {}));
    source.addEventListener("error", () => {
      if (source.readyState === EventSource.CLOSED) this.learnWhy(source);
      else this.become("lost");
    });
  }

  told(use) {
    this.heard = performance.now();
    this.refused = null;
    this.become("live");
    use();
  }

  // A browser gives up for good where the server answers with an error, and does not say which.
  async learnWhy(source) {
    const refused = await refusal(source.url);
    if (source !== this.source) return;
    if (refused?.status === 401) location.assign("/login");
    this.refused = refused;
    this.become(refused === null ? "lost" : "refused");
  }

  look() {
    const now = performance.now();
    if (this.state === "live" && now - this.heard > 1000 * STALE_SECONDS) this.become("stale");
    // a way that was lost without a word looks open for ever
    if (this.state === "stale" && now - this.tried > 1000 * STALE_SECONDS) this.connect();
    const over = this.source?.readyState === EventSource.CLOSED && this.refused?.status !== 404;
    if (over && now - this.tried > 1000 * RETRY_SECONDS) this.connect();
  }

  become(state) {
    if (state === this.state) return;
    this.state = state;
    this.listeners.connection(state);
  }
}
