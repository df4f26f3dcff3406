// A run as far as it was told: sections that came last, and what only ever grows.

import { LaneModel } from "./lane_model.js";

// a job's, once it is over
export const ENDED = ["done", "failed", "cancelled"];
// after so long a silence nobody is thought to be at a run, unless a session is seen there
const QUIET_SECONDS = 60;

const SECTIONS = ["head", "tail", "speculation", "learning", "times", "drafter", "attempts", "advice"];
const LINES = 2000;
const STEPS = 2000;

export class RunModel {
  constructor() {
    this.lanes = new LaneModel();
    // whether the server tells something, and whether a session is seen to be at the run
    this.connected = false;
    this.attended = false;
    this.clear();
  }

  clear() {
    this.lanes.clear();
    this.lines = [];
    this.reading = 0;
    this.broken = null;
    this.toldAt = performance.now();
    for (const name of SECTIONS) this[name] = null;
  }

  // Returns the names of what has changed.
  apply(update) {
    const changed = new Set();
    if (update.full) {
      this.clear();
      for (const name of [...SECTIONS, "lanes", "lines"]) changed.add(name);
    }
    if (update.reading !== undefined) this.reading = update.reading;
    if (update.broken !== undefined) this.broken = update.broken;
    for (const name of SECTIONS) {
      if (update[name] === undefined) continue;
      this[name] = grown(this[name], update[name]);
      changed.add(name);
    }
    if (update.head) this.toldAt = performance.now();
    if (update.lanes) {
      this.lanes.apply(update.lanes);
      changed.add("lanes");
    }
    if (update.log_lines?.length) {
      this.lines.push(...update.log_lines);
      if (this.lines.length > LINES) this.lines.splice(0, this.lines.length - LINES);
      changed.add("lines");
    }
    return changed;
  }

  // Its journal has a beginning and no end.
  get open() {
    return this.head !== null && this.head.began !== null && !ENDED.includes(this.head.status);
  }

  get live() {
    return this.open && (this.attended || this.quiet <= QUIET_SECONDS);
  }

  // It has begun, and nothing goes on in it.
  get still() {
    return this.head !== null && this.head.began !== null && !this.live;
  }

  // Seconds since the last entry: they pass between two messages, too.
  get quiet() {
    return this.head.quiet + (this.connected ? (performance.now() - this.toldAt) / 1000 : 0);
  }

  // Seconds since the run began. Of a silence that lasts no more is shown than tells that there is one.
  get now() {
    if (!this.open) return this.head?.seconds ?? 0;
    const shown = this.live ? Infinity : Math.max(5, 0.05 * this.head.seconds);
    return this.head.seconds + Math.min(this.quiet, shown);
  }

  // Until when something is known of its workers, in seconds since it began.
  get heard() {
    return this.attended ? this.now : (this.head?.seconds ?? 0);
  }
}

// Rows of steps are told once: those before `since` are as they were.
function grown(before, section) {
  if (section.since === null || section.since === undefined) return section;
  const after = { ...section };
  for (const name of ["steps", "evals"]) {
    if (!section[name]) continue;
    const kept = before[name].filter((row) => row.step < section.since);
    after[name] = [...kept, ...section[name]].slice(-STEPS);
  }
  return after;
}
