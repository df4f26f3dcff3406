// Health of a session: streams, leases, memory.

import { Table, card, h, left, setText } from "./dom.js";
import { bytes, count, number, plural, seconds } from "./format.js";

export class StreamsCard {
  constructor() {
    this.summary = h("p");
    this.streams = new Table(
      [left("stream"), left("consumer group"), "entries", "delivered, not acknowledged", "some unread", "oldest waits"],
      { empty: "No stream yet." },
    );
    this.workers = new Table(
      [left("worker"), left("lease"), "ranks", "running answers", left("job"), "incarnation", "memory", "process"],
      { empty: "No worker has sent a heartbeat." },
    );
    this.element = card(
      "Queues and health",
      { id: "streams", wide: true },
      this.summary,
      h("h3", {}, "Streams"),
      this.streams.element,
      h("h3", {}, "Workers"),
      this.workers.element,
    );
  }

  update(session) {
    if (!session) return;
    const { health } = session;
    if (health.error) {
      setText(this.summary, `The session's Redis does not answer: ${health.error}`);
      return;
    }
    setText(
      this.summary,
      `Redis uses ${bytes(health.redis_bytes)}; the machine ${bytes(health.memory_used)} of ${bytes(health.memory_total)}, load ${number(health.load, 1)}; ${plural(health.dead_letters, "dead letter")}; ${plural(health.running, "running answer")} on ${plural(health.all_workers, "worker")}.`,
    );
    this.streams.update(
      health.streams.map((each) => [
        each.job ? `${each.name} of ${each.job}` : each.name,
        each.group ?? "none",
        count(each.depth),
        count(each.pending),
        each.unread ? "yes" : "no",
        each.oldest_seconds ? seconds(each.oldest_seconds) : "–",
      ]),
    );
    const listed = health.workers.length;
    this.workers.caption = health.all_workers > listed ? `${count(listed)} of ${count(health.all_workers)}, those in trouble first` : null;
    this.workers.update(
      health.workers.map((each) => [
        each.worker,
        lease(each.silent_seconds, health.lease_seconds),
        each.ranks ? count(each.ranks) : "starting",
        count(each.running),
        each.job ?? "–",
        count(each.incarnation),
        bytes(each.memory_bytes),
        String(each.pid),
      ]),
    );
  }
}

function lease(silent, limit) {
  if (silent > limit) return `ended, silent for ${seconds(silent)}`;
  return silent > limit / 2 ? `silent for ${seconds(silent)} of ${limit} s` : "held";
}
