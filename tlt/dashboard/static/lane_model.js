// What the lanes show: for each worker the moments at which its duty changed, and what ran.

export const DUTIES = ["rollout", "draft", "preempting", "learn", "waiting", "idle", "leaving", "away"];
const CODES = new Map(DUTIES.map((duty, code) => [duty, code]));
export const OVER = -1;
const ROLLOUT = CODES.get("rollout");
// as many as the server remembers: changes and batches over all lanes, marks of a kind
const KEPT = 40_000;
const MARKS = 4_000;
// of so many lanes one may be unknown, and what all did is told
const MISSED = 10;
// entries that come between two tidyings
const TIDY = 10_000;

class Lane {
  constructor(name) {
    this.name = name;
    this.at = [];
    this.duty = [];
    this.batchAt = [];
    this.rows = [];
    this.marks = [];
    // whether its oldest changes are gone
    this.forgot = false;
  }

  // Until when its duty is not known; before its first change a worker was not there.
  get unknown() {
    return this.forgot ? this.at[0] : 0;
  }

  // The last change at or before a time; -1 before the first.
  find(time) {
    return lastBefore(this.at, time);
  }

  // From when to when the newest rollout was that began before a time; without limits where none is kept.
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
    // from then on enough lanes are known to tell what all did, and from then on all are
    this.since = 0;
    this.complete = 0;
    this.mostRows = 1;
    this.untidied = 0;
  }

  apply(news) {
    for (let index = this.lanes.length; index < news.names.length; index++) {
      this.lanes.push(new Lane(news.names[index]));
    }
    if (this.order.length !== this.lanes.length) {
      const names = new Intl.Collator("en", { numeric: true });
      this.order = [...this.lanes].sort((a, b) => names.compare(a.name, b.name));
    }
    for (const [worker, at, duty] of news.changes) {
      const lane = this.lanes[worker];
      lane.at.push(at);
      lane.duty.push(CODES.get(duty) ?? OVER);
    }
    for (const [worker, at, rows] of news.batches) {
      const lane = this.lanes[worker];
      lane.batchAt.push(at);
      lane.rows.push(rows);
      if (rows > this.mostRows) this.mostRows = rows;
    }
    for (const [at, kind, worker, text] of news.marks) {
      (worker === null ? this.marks : this.lanes[worker].marks).push({ at, kind, text });
    }
    for (const worker of news.forgotten) this.lanes[worker].forgot = true;
    this.measure();
    this.untidied += news.changes.length + news.batches.length + news.marks.length;
    if (this.untidied > TIDY) this.tidy();
  }

  // The oldest go.
  tidy() {
    this.untidied = 0;
    const share = (all) => Math.max(16, Math.floor(all / this.lanes.length));
    for (const lane of this.lanes) {
      const first = lane.at.length - share(KEPT);
      if (first > 0) lane.forgot = true;
      for (const list of [lane.at, lane.duty, lane.batchAt, lane.rows]) {
        list.splice(0, Math.max(0, list.length - share(KEPT)));
      }
      lane.marks = newest(lane.marks, share(MARKS));
    }
    this.marks = newest(this.marks, MARKS);
    this.measure();
  }

  measure() {
    const unknown = this.lanes.map((lane) => lane.unknown).sort((a, b) => b - a);
    this.since = unknown[Math.floor(unknown.length / MISSED)] ?? 0;
    this.complete = unknown[0] ?? 0;
  }

  // For each of `width` pixels the workers at each duty, as the mean over its time; last, of how many it is not known.
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
      add(DUTIES.length, 0, lane.unknown);
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

// Of each kind, as there are far more of some than of others.
function newest(marks, most) {
  const found = new Map();
  return marks
    .toReversed()
    .filter(({ kind }) => {
      found.set(kind, (found.get(kind) ?? 0) + 1);
      return found.get(kind) <= most;
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
