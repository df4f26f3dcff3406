// The data of the worker lanes: for each worker the times at which its duty changed, and its batch sizes.

import { DUTIES } from "./names.js";

const CODES = new Map(DUTIES.map((duty, code) => [duty, code]));
// the duty after the end of the run
export const OVER = -1;
const ROLLOUT = CODES.get("rollout");
// as many as the server keeps: changes and batches over all lanes, marks of each kind
const KEPT = 40_000;
const MARKS = 4_000;
// the shares of all workers are drawn while at most one lane in UNKNOWN_SHARE is unknown
const UNKNOWN_SHARE = 10;
// new entries between two clean-ups
const TRIM_EVERY = 10_000;

class Lane {
  constructor(name) {
    this.name = name;
    this.at = [];
    this.duty = [];
    this.batchAt = [];
    this.rows = [];
    this.marks = [];
    // whether its oldest changes were dropped
    this.truncated = false;
  }

  // The time before which its duty is not known; before its first change the worker did not exist.
  get unknownUntil() {
    return this.truncated ? this.at[0] : 0;
  }

  // Returns the index of the last change at or before a time, or -1.
  find(time) {
    return lastBefore(this.at, time);
  }

  // Returns the limits of the newest rollout that began before a time, without limits where none is kept.
  rolloutAt(time) {
    let index = lastBefore(this.at, time);
    while (index >= 0 && (this.duty[index] !== ROLLOUT || this.at[index] === time)) index--;
    return index < 0 ? [0, Infinity] : [this.at[index], this.at[index + 1] ?? Infinity];
  }

  batch(time) {
    const index = lastBefore(this.batchAt, time);
    return index < 0 ? null : this.rows[index];
  }
}

export class LaneModel {
  constructor() {
    this.clear();
  }

  clear() {
    this.lanes = [];
    this.order = [];
    this.marks = [];
    // the times from which enough lanes are known to draw the shares of all, and from which all are known
    this.sharesSince = 0;
    this.completeSince = 0;
    this.mostRows = 1;
    this.untrimmed = 0;
  }

  apply(update) {
    for (let index = this.lanes.length; index < update.names.length; index++) {
      this.lanes.push(new Lane(update.names[index]));
    }
    if (this.order.length !== this.lanes.length) {
      const names = new Intl.Collator("en", { numeric: true });
      this.order = [...this.lanes].sort((a, b) => names.compare(a.name, b.name));
    }
    for (const [worker, at, duty] of update.changes) {
      const lane = this.lanes[worker];
      lane.at.push(at);
      lane.duty.push(CODES.get(duty) ?? OVER);
    }
    for (const [worker, at, rows] of update.batches) {
      const lane = this.lanes[worker];
      lane.batchAt.push(at);
      lane.rows.push(rows);
      if (rows > this.mostRows) this.mostRows = rows;
    }
    for (const [at, kind, worker, text] of update.marks) {
      (worker === null ? this.marks : this.lanes[worker].marks).push({ at, kind, text });
    }
    for (const worker of update.forgotten) this.lanes[worker].truncated = true;
    this.updateKnown();
    this.untrimmed += update.changes.length + update.batches.length + update.marks.length;
    if (this.untrimmed > TRIM_EVERY) this.trim();
  }

  // Drops the oldest entries.
  trim() {
    this.untrimmed = 0;
    const share = (all) => Math.max(16, Math.floor(all / this.lanes.length));
    for (const lane of this.lanes) {
      const first = lane.at.length - share(KEPT);
      if (first > 0) lane.truncated = true;
      for (const list of [lane.at, lane.duty, lane.batchAt, lane.rows]) {
        list.splice(0, Math.max(0, list.length - share(KEPT)));
      }
      lane.marks = newest(lane.marks, share(MARKS));
    }
    this.marks = newest(this.marks, MARKS);
    this.updateKnown();
  }

  updateKnown() {
    const unknown = this.lanes.map((lane) => lane.unknownUntil).sort((a, b) => b - a);
    this.sharesSince = unknown[Math.floor(unknown.length / UNKNOWN_SHARE)] ?? 0;
    this.completeSince = unknown[0] ?? 0;
  }

  // Returns for each duty the mean number of workers at each of `width` pixels, and last the number of unknown ones.
  shares(from, to, now, width) {
    const columns = () => Array.from({ length: DUTIES.length + 1 }, () => new Float64Array(width + 2));
    const sums = columns();
    const parts = columns();
    const scale = width / (to - from);
    const add = (row, begins, ends) => {
      const a = Math.max(0, (begins - from) * scale);
      const b = Math.min(width, (ends - from) * scale);
      if (b <= a) return;
      const left = Math.floor(a);
      const right = Math.floor(b);
      if (left === right) {
        parts[row][left] += b - a;
      } else {
        parts[row][left] += left + 1 - a;
        parts[row][right] += b - right;
        sums[row][left + 1] += 1;
        sums[row][right] -= 1;
      }
    };
    for (const lane of this.lanes) {
      add(DUTIES.length, 0, lane.unknownUntil);
      const first = Math.max(0, lane.find(from));
      for (let index = first; index < lane.at.length; index++) {
        if (lane.at[index] > to) break;
        const duty = lane.duty[index];
        if (duty === OVER) continue;
        const end = index + 1 < lane.at.length ? lane.at[index + 1] : now;
        add(duty, lane.at[index], end);
      }
    }
    for (let row = 0; row < parts.length; row++) {
      let running = 0;
      for (let x = 0; x < width; x++) {
        running += sums[row][x];
        parts[row][x] += running;
      }
    }
    return parts;
  }
}

// Returns the newest marks of each kind: some kinds are far more frequent.
function newest(marks, limit) {
  const found = new Map();
  return marks
    .toReversed()
    .filter(({ kind }) => {
      found.set(kind, (found.get(kind) ?? 0) + 1);
      return found.get(kind) <= limit;
    })
    .reverse();
}

export function lastBefore(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
