// A run as far as it was told: sections that came last, and what only ever grows.

import { LaneModel } from "./lane_model.js";

const SECTIONS = ["head", "tail", "speculation", "learning", "times", "drafter", "attempts", "advice"];
const LINES = 2000;
const STEPS = 2000;

export class RunModel {
  constructor() {
    this.lanes = new LaneModel();
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
    if (update.whole) {
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
    if (update.lines?.length) {
      this.lines.push(...update.lines);
      if (this.lines.length > LINES) this.lines.splice(0, this.lines.length - LINES);
      changed.add("lines");
    }
    return changed;
  }

  get live() {
    return this.head !== null && this.head.status === "running";
  }

  // Seconds since the run began: they pass between two messages, too.
  now(connected) {
    if (this.head === null) return 0;
    if (!this.live || this.head.quiet > 3600) return this.head.seconds;
    const since = connected ? (performance.now() - this.toldAt) / 1000 : 0;
    return this.head.seconds + this.head.quiet + since;
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
