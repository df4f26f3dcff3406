// What the lanes show: for each worker the moments at which its duty changed, and what ran.

export const DUTIES = ["rollout", "draft", "preempting", "learn", "waiting", "idle", "leaving", "away"];
const CODES = new Map(DUTIES.map((duty, code) => [duty, code]));
export const OVER = -1;
const ROLLOUT = CODES.get("rollout");
// as many as the server remembers: changes and batches over all lanes, marks of a kind
const KEPT = 40_000;
const MARKS = 4_000;
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
    // from then on the duty of every worker is known
    this.since = 0;
    this.mostRows = 1;
    this.untidied = 0;
  }

  apply(news) {
    this.since = Math.max(this.since, news.since);
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
    this.untidied += news.changes.length + news.batches.length + news.marks.length;
    if (this.untidied > TIDY) this.tidy();
  }

  // The oldest go.
  tidy() {
    this.untidied = 0;
    const share = (all) => Math.max(16, Math.floor(all / this.lanes.length));
    for (const lane of this.lanes) {
      const first = lane.at.length - share(KEPT);
      if (first > 0) this.since = Math.max(this.since, lane.at[first]);
      for (const list of [lane.at, lane.duty, lane.batchAt, lane.rows]) {
        list.splice(0, Math.max(0, list.length - share(KEPT)));
      }
      lane.marks = newest(lane.marks, share(MARKS));
    }
    this.marks = newest(this.marks, MARKS);
  }

  // For each of `width` pixels the workers at each duty, as the mean over its time.
  shares(from, to, now, width) {
    const sums = DUTIES.map(() => new Float64Array(width + 2));
    const parts = DUTIES.map(() => new Float64Array(width + 2));
    const scale = width / (to - from);
    for (const lane of this.lanes) {
      const first = Math.max(0, lane.find(from));
      for (let index = first; index < lane.at.length; index++) {
        if (lane.at[index] > to) break;
        const duty = lane.duty[index];
        if (duty === OVER) continue;
        const end = index + 1 < lane.at.length ? lane.at[index + 1] : now;
        const a = Math.max(0, (lane.at[index] - from) * scale);
        const b = Math.min(width, (end - from) * scale);
        if (b <= a) continue;
        const left = Math.floor(a);
        const right = Math.floor(b);
        if (left === right) {
          parts[duty][left] += b - a;
        } else {
          parts[duty][left] += left + 1 - a;
          parts[duty][right] += b - right;
          sums[duty][left + 1] += 1;
          sums[duty][right] -= 1;
        }
      }
    }
    for (let duty = 0; duty < DUTIES.length; duty++) {
      let running = 0;
      for (let x = 0; x < width; x++) {
        running += sums[duty][x];
        parts[duty][x] += running;
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
