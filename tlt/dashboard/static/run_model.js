// The state of a run, folded from the updates that the server sends.

import { LaneModel } from "./lane_model.js";

// states of a job that is over
export const ENDED = ["done", "failed", "cancelled"];
// seconds without an entry after which a run counts as over, unless its session is up
const QUIET_SECONDS = 60;

const SECTIONS = ["head", "tail", "speculation", "learning", "times", "drafter", "attempts", "advice"];
const LOG_LINES = 2000;
const STEPS = 2000;

export class RunModel {
  constructor() {
    this.lanes = new LaneModel();
    // whether the server sends updates, and whether the session that runs the job is up
    this.connected = false;
    this.followed = false;
    this.clear();
  }

  clear() {
    this.lanes.clear();
    this.logLines = [];
    this.reading = 0;
    this.broken = null;
    this.headReceived = performance.now();
    for (const name of SECTIONS) this[name] = null;
  }

  // Returns the names of the parts that have changed.
  apply(update) {
    const changed = new Set();
    if (update.full) {
      this.clear();
      for (const name of [...SECTIONS, "lanes", "logLines"]) changed.add(name);
    }
    if (update.reading !== undefined) this.reading = update.reading;
    if (update.broken !== undefined) this.broken = update.broken;
    for (const name of SECTIONS) {
      if (update[name] === undefined) continue;
      this[name] = applyDelta(this[name], update[name]);
      changed.add(name);
    }
    if (update.head) this.headReceived = performance.now();
    if (update.lanes) {
      this.lanes.apply(update.lanes);
      changed.add("lanes");
    }
    if (update.log_lines?.length) {
      this.logLines.push(...update.log_lines);
      if (this.logLines.length > LOG_LINES) this.logLines.splice(0, this.logLines.length - LOG_LINES);
      changed.add("logLines");
    }
    return changed;
  }

  // The journal has a beginning and no end.
  get open() {
    return this.head !== null && this.head.began !== null && !ENDED.includes(this.head.status);
  }

  get live() {
    return this.open && (this.followed || this.quiet <= QUIET_SECONDS);
  }

  // The run has begun and does not go on.
  get stopped() {
    return this.head !== null && this.head.began !== null && !this.live;
  }

  // Seconds since the last entry; they also pass between two updates.
  get quiet() {
    return this.head.quiet_seconds + (this.connected ? (performance.now() - this.headReceived) / 1000 : 0);
  }

  // Seconds since the run began. Only the beginning of a long silence is shown.
  get now() {
    if (!this.open) return this.head?.seconds ?? 0;
    const shown = this.live ? Infinity : Math.max(5, 0.05 * this.head.seconds);
    return this.head.seconds + Math.min(this.quiet, shown);
  }

  // The time until which the duties of its workers are known, in seconds since the run began.
  get knownUntil() {
    return this.followed ? this.now : (this.head?.seconds ?? 0);
  }
}

// A section with `since` has only the rows from that step on; earlier rows are unchanged.
function applyDelta(before, section) {
  if (section.since === null || section.since === undefined) return section;
  const after = { ...section };
  for (const name of ["steps", "evals"]) {
    if (!section[name]) continue;
    const kept = before[name].filter((row) => row.step < section.since);
    after[name] = [...kept, ...section[name]].slice(-STEPS);
  }
  return after;
}
