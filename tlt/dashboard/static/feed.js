// What the server tells, and whether it still does. The browser comes back by itself, and says
// with Last-Event-ID how far it was told.

const STALE_SECONDS = 12;

export class Feed {
  constructor({ run, session, connection }) {
    this.listeners = { run, session, connection };
    this.state = null;
    this.source = null;
    this.heard = 0;
    this.timer = setInterval(() => this.look(), 1000);
  }

  open(job) {
    this.source?.close();
    const query = job === null ? "" : `?job=${encodeURIComponent(job)}`;
    this.source = new EventSource(`/api/events${query}`);
    this.become("connecting");
    this.source.addEventListener("session", (event) => this.told(() => this.listeners.session(JSON.parse(event.data))));
    this.source.addEventListener("run", (event) => this.told(() => this.listeners.run(JSON.parse(event.data))));
    this.source.addEventListener("beat", () => this.told(() => {}));
    this.source.addEventListener("error", () => this.become("lost"));
    this.source.addEventListener("open", () => this.told(() => {}));
  }

  told(use) {
    this.heard = performance.now();
    this.become("live");
    use();
  }

  look() {
    if (this.state === "live" && performance.now() - this.heard > 1000 * STALE_SECONDS) this.become("stale");
    // a browser gives up for good where the server answered with an error
    if (this.source?.readyState === EventSource.CLOSED) this.reopen();
  }

  reopen() {
    const url = this.source.url;
    const again = performance.now() - this.heard > 3000;
    if (!again) return;
    this.heard = performance.now();
    const job = new URL(url).searchParams.get("job");
    this.open(job);
    this.become("lost");
  }

  become(state) {
    if (state === this.state) return;
    this.state = state;
    this.listeners.connection(state);
  }
}
