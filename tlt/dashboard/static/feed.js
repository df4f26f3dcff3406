// The event stream. The browser reconnects by itself and sends the id of the last event that it received.
// A hidden page closes its connection: a browser has only six per address, over all its windows.

import { refusal } from "./api.js";

const STALE_SECONDS = 12;
const RETRY_SECONDS = 3;
const HIDDEN_SECONDS = 2;

export class Feed {
  constructor({ run, session, connection }) {
    this.handlers = { run, session, connection };
    this.state = null;
    this.url = null;
    this.source = null;
    this.refused = null;
    this.received = 0;
    this.tried = 0;
    this.pauseTimer = null;
    setInterval(() => this.check(), 1000);
    document.addEventListener("visibilitychange", () => this.onVisibility());
  }

  open(job) {
    this.url = `/api/events${job === null ? "" : `?job=${encodeURIComponent(job)}`}`;
    this.refused = null;
    if (document.hidden) this.pause();
    else this.resume();
  }

  resume() {
    this.setState("connecting");
    this.connect();
  }

  pause() {
    this.source?.close();
    this.source = null;
    this.setState("paused");
  }

  onVisibility() {
    clearTimeout(this.pauseTimer);
    if (document.hidden) this.pauseTimer = setTimeout(() => this.pause(), 1000 * HIDDEN_SECONDS);
    else if (this.source === null && this.url !== null) this.resume();
  }

  connect() {
    this.source?.close();
    this.tried = performance.now();
    const source = new EventSource(this.url);
    this.source = source;
    for (const name of ["session", "run"]) {
      source.addEventListener(name, (event) => {
        this.receive();
        this.handlers[name](JSON.parse(event.data));
      });
    }
    for (const name of ["heartbeat", "open"]) source.addEventListener(name, () => this.receive());
    source.addEventListener("error", () => {
      if (source.readyState === EventSource.CLOSED) this.findRefusal(source);
      else this.setState("lost");
    });
  }

  receive() {
    this.received = performance.now();
    this.refused = null;
    this.setState("live");
  }

  // EventSource gives up after an error status and does not say which one it was.
  async findRefusal(source) {
    const refused = await refusal(source.url);
    if (source !== this.source) return;
    if (refused?.status === 401) location.assign("/login");
    this.refused = refused;
    this.setState(refused === null ? "lost" : "refused");
  }

  check() {
    const now = performance.now();
    if (this.state === "live" && now - this.received > 1000 * STALE_SECONDS) this.setState("stale");
    // a connection that was lost without notice looks open for ever
    if (this.state === "stale" && now - this.tried > 1000 * STALE_SECONDS) this.connect();
    const closed = this.source?.readyState === EventSource.CLOSED && this.refused?.status !== 404;
    if (closed && now - this.tried > 1000 * RETRY_SECONDS) this.connect();
  }

  setState(state) {
    if (state === this.state) return;
    this.state = state;
    this.handlers.connection(state);
  }
}
