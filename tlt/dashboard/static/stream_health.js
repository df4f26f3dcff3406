// Queues and health: streams, leases, memory.

import { card, h, renew, say, table } from "./dom.js";
import { bytes, count, number, plural, seconds } from "./format.js";

export class StreamsCard {
  constructor() {
    this.sum = h("p");
    this.streams = h("div");
    this.workers = h("div");
    this.element = card(
      "Queues and health",
      { id: "streams", wide: true },
      this.sum,
      h("h3", {}, "Streams"),
      this.streams,
      h("h3", {}, "Workers"),
      this.workers,
    );
  }

  update(session) {
    if (!session) return;
    const { health } = session;
    if (health.error) {
      say(this.sum, `The session's Redis does not answer: ${health.error}`);
      return;
    }
    say(
      this.sum,
      `Redis uses ${bytes(health.redis_bytes)}; the machine ${bytes(health.memory_used)} of ${bytes(health.memory_total)}, load ${number(health.load, 1)}; ${plural(health.dead_letters, "dead letter")}; ${plural(health.running, "row")} on ${plural(health.all_workers, "worker")}.`,
    );
    renew(
      this.streams,
      table(
        [{ name: "stream", left: true }, { name: "read by", left: true }, { name: "entries" }, { name: "delivered, not yet acknowledged" }, { name: "some unread" }, { name: "oldest waits" }],
        health.streams.map((each) => [
          each.name,
          each.group ?? "who likes",
          count(each.depth),
          count(each.pending),
          each.unread ? "yes" : "no",
          each.oldest_seconds ? seconds(each.oldest_seconds) : "–",
        ]),
        { empty: "No stream yet." },
      ),
    );
    renew(this.workers, workers(health));
  }
}

function workers(health) {
  const lease = health.lease_seconds;
  return table(
    [{ name: "worker", left: true }, { name: "lease", left: true }, { name: "ranks" }, { name: "rows now" }, { name: "job", left: true }, { name: "incarnation" }, { name: "memory" }, { name: "process" }],
    health.workers.map((each) => [
      each.worker,
      each.silent_seconds > lease ? `ended, silent for ${seconds(each.silent_seconds)}` : each.silent_seconds > lease / 2 ? `silent for ${seconds(each.silent_seconds)} of ${lease} s` : "held",
      each.ranks ? count(each.ranks) : "starting",
      count(each.running),
      each.job ?? "–",
      count(each.incarnation),
      bytes(each.memory_bytes),
      String(each.pid),
    ]),
    {
      caption:
        health.all_workers > health.workers.length
          ? `${count(health.workers.length)} of ${count(health.all_workers)}, those with trouble first`
          : undefined,
      empty: "No worker beats.",
    },
  );
}
