// The lanes: who did what when. A share of all workers on top, then a lane each with its batch size.

import { card, h, say, show } from "./dom.js";
import { clock, count, number, percent, plural, seconds } from "./format.js";
import { DUTIES, OVER, lastBefore } from "./lane_model.js";
import { colours, onTheme } from "./theme.js";

const NAMES = {
  rollout: "rollout",
  draft: "trains the drafter",
  preempting: "stops training it",
  learn: "learns",
  waiting: "waits for new weights",
  idle: "idle",
  leaving: "starts fresh ranks",
  away: "away",
};
const BAND = 18;
const AXIS = 20;
const SHARE = 54;
// more are shown as one until somebody opens them
const MANY = 32;
const LATELY = 600;
const LEAST = 0.5;

export class Lanes {
  constructor(model) {
    this.model = model;
    this.now = 0;
    // nobody knows what the workers did after it
    this.heard = 0;
    this.live = false;
    // null: everything; otherwise from and to, in seconds since the run began
    this.window = null;
    // at the right edge, as time goes on
    this.follows = true;
    this.opened = false;
    this.selected = { row: 0, at: null };
    this.hovered = null;
    this.build();
    this.forget = onTheme(() => this.draw());
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.box);
  }

  build() {
    this.top = h("canvas");
    this.axis = h("canvas");
    this.body = h("canvas");
    this.spacer = h("div", { class: "spacer" });
    this.rows = h("div", { class: "rows" }, this.spacer, this.body);
    this.tip = h("div", { class: "tip", hidden: true });
    // what the keyboard has led to; what a pointer passes over is not read out
    this.spoken = h("p", { class: "unseen", role: "status" });
    this.chosen = h("div", { class: "selection", hidden: true });
    this.box = h(
      "div",
      {
        class: "lanes",
        tabindex: "0",
        role: "application",
        "aria-label":
          "Worker lanes. Left and right: from one duty to the next. Up and down: another worker. Plus and minus: zoom. 0: everything. L: follow.",
        onkeydown: (event) => this.key(event),
        onblur: () => this.point(null),
      },
      this.top,
      this.rows,
      this.axis,
      this.chosen,
      this.tip,
      this.spoken,
    );
    this.rows.addEventListener("scroll", () => this.drawRows());
    for (const [name, listener] of Object.entries({
      pointerdown: (event) => this.press(event),
      pointermove: (event) => this.move(event),
      pointerup: (event) => this.release(event),
      pointercancel: () => this.cancelDrag(),
      pointerleave: () => this.drag || this.point(null),
      dblclick: () => this.all(),
    })) {
      this.box.addEventListener(name, listener);
    }
    this.box.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    const tool = (label, title, act) => h("button", { type: "button", title, onclick: act }, label);
    this.followButton = tool("Live", "Follow the newest (L)", () => this.follow());
    this.openButton = h("button", { type: "button", onclick: () => this.open() });
    this.note = h("span", { class: "hint" });
    this.unknown = h("span", { hidden: true }, h("i", { class: "swatch-unknown" }), "unknown: nothing was heard, or it is not kept");
    const legend = h(
      "div",
      { class: "legend" },
      DUTIES.map((duty) => h("span", {}, h("i", { class: `swatch-${duty}` }), NAMES[duty])),
      h("span", {}, h("i", { class: "swatch-batch" }), "rows that run at once"),
      h("span", {}, h("i", { class: "swatch-drafter" }), "drafter in use, or speculation given up"),
      h("span", {}, h("i", { class: "swatch-strategy" }), "decodes another way"),
      h("span", {}, h("i", { class: "swatch-lost" }), "lost"),
      this.unknown,
    );
    this.card = card(
      "Workers",
      {
        id: "lanes",
        wide: true,
        note: [
          this.note,
          h("span", { class: "space" }),
          h(
            "div",
            { class: "tools" },
            this.openButton,
            tool("−", "Zoom out (−)", () => this.zoom(2)),
            tool("+", "Zoom in (+)", () => this.zoom(0.5)),
            tool("All", "Everything (0)", () => this.all()),
            this.followButton,
          ),
        ],
      },
      h("div", { class: "stack" }, this.box, legend),
    );
  }

  close() {
    this.forget();
    this.observer.disconnect();
  }

  update({ now, heard, live }) {
    this.now = now;
    this.heard = heard;
    this.live = live;
    this.draw();
  }

  // --- what is seen

  get many() {
    return this.model.order.length > MANY;
  }

  span() {
    if (this.window !== null && !this.follows) return this.window;
    const length = this.window ? this.window[1] - this.window[0] : this.follows && this.live ? LATELY : Infinity;
    const to = Math.max(this.now, LEAST);
    return [Math.max(0, to - length), to];
  }

  setSpan(from, to) {
    const length = Math.max(LEAST, Math.min(to - from, Math.max(this.now, LEAST)));
    const start = Math.max(0, Math.min(from, this.now - length));
    this.window = [start, start + length];
    this.follows = this.live && this.window[1] >= this.now - 0.02 * length;
    this.draw();
  }

  zoom(factor, around = null) {
    const [from, to] = this.span();
    const middle = around ?? this.selected.at ?? (this.follows ? to : (from + to) / 2);
    this.setSpan(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }

  all() {
    this.follows = false;
    this.window = null;
    this.draw();
  }

  follow() {
    this.follows = true;
    this.window = null;
    this.draw();
  }

  open() {
    this.opened = !this.opened;
    this.draw();
  }

  // --- drawing

  get gutter() {
    return this.box.clientWidth < 520 ? 40 : 64;
  }

  get rowHeight() {
    const rows = this.model.order.length;
    return rows <= 8 ? 42 : rows <= MANY ? 28 : 16;
  }

  x(time) {
    const [from, to] = this.span();
    return this.gutter + ((time - from) / (to - from)) * (this.box.clientWidth - this.gutter);
  }

  time(x) {
    const [from, to] = this.span();
    return from + ((x - this.gutter) / (this.box.clientWidth - this.gutter)) * (to - from);
  }

  draw() {
    if (!this.box.isConnected || !this.box.clientWidth) return;
    const workers = this.model.order.length;
    const rows = !this.many || this.opened;
    say(this.openButton, this.opened ? "Close the lanes" : `Open ${count(workers)} lanes`);
    show(this.openButton, this.many);
    show(this.rows, rows);
    this.followButton.setAttribute("aria-pressed", String(this.live && this.follows));
    this.followButton.disabled = !this.live;
    const [from, to] = this.span();
    say(this.note, `${plural(workers, "worker")}, ${clock(from)} to ${clock(to)} (min:s)`);
    show(this.unknown, this.heard < this.now || from < this.model.complete);
    this.drawTop();
    if (rows) this.drawRows();
    this.drawAxis();
    if (this.hovered) this.point(this.hovered);
  }

  drawTop() {
    const width = this.box.clientWidth;
    const g = prepare(this.top, width, BAND + SHARE + 6);
    const paint = colours();
    const left = this.gutter;
    const [from, to] = this.span();
    const pixels = Math.max(1, Math.floor(width - left));
    const total = this.model.order.length || 1;
    g.fillStyle = paint.sunken;
    g.fillRect(left, BAND, pixels, SHARE);
    const shares = this.model.shares(from, to, Math.min(to, this.heard), pixels);
    const unknown = shares.at(-1);
    const base = new Float64Array(pixels);
    const known = Math.max(0, Math.floor(this.x(this.model.since) - left));
    DUTIES.forEach((duty, code) => {
      g.fillStyle = paint[duty];
      for (let x = known; x < pixels; x++) {
        const height = (shares[code][x] / (total - unknown[x])) * SHARE;
        if (height <= 0) continue;
        g.fillRect(left + x, BAND + SHARE - base[x] - height, 1, height);
        base[x] += height;
      }
    });
    g.fillStyle = paint.soft;
    g.font = font(11);
    g.textAlign = "right";
    g.textBaseline = "middle";
    g.fillText("all", left - 6, BAND + SHARE / 2);
    if (known) hatch(g, left, BAND, Math.min(known, pixels), SHARE);
    this.drawUnknown(g, BAND, SHARE);
    this.drawLines(g, { step: 2, drafter: 10 }, BAND + SHARE);
    this.drawNames(g);
  }

  drawUnknown(g, top, tall) {
    const a = Math.max(this.gutter, this.x(this.heard));
    const b = this.x(this.now);
    if (b > a) hatch(g, a, top, b - a, tall);
  }

  // Names of steps, where there is room.
  drawNames(g) {
    let free = -Infinity;
    g.fillStyle = colours().soft;
    g.textBaseline = "middle";
    g.textAlign = "left";
    g.font = font(11);
    for (const { mark, x, isDrafter } of this.seen()) {
      if (isDrafter || x <= free) continue;
      const name = mark.kind === "eval" ? "eval" : mark.text;
      g.fillText(name, x + 3, 8);
      free = x + 10 + g.measureText(name).width;
    }
  }

  // Steps and drafters, over the whole height.
  drawLines(g, tops, height) {
    const paint = colours();
    let free = -Infinity;
    for (const { x, isDrafter } of this.seen()) {
      // many in a row leave the duty to be seen
      if (isDrafter && x < free) continue;
      if (isDrafter) free = x + 5;
      g.globalAlpha = isDrafter ? 1 : 0.5;
      const top = isDrafter ? tops.drafter : tops.step;
      if (isDrafter) {
        // what is between the dashes sets them off from any duty
        stroke(g, x, top, height, paint.card);
        g.setLineDash([4, 3]);
      }
      stroke(g, x, top, height, isDrafter ? paint.drafter : paint.soft);
      g.setLineDash([]);
    }
    g.globalAlpha = 1;
  }

  // Marks of all workers that lie in the span, and where.
  seen() {
    const [from, to] = this.span();
    const found = [];
    for (const mark of this.model.marks) {
      if (mark.at < from || mark.at > to) continue;
      const isDrafter = mark.kind === "drafter" || mark.kind === "off";
      if (!isDrafter && mark.kind !== "step" && mark.kind !== "eval") continue;
      found.push({ mark, x: Math.round(this.x(mark.at)) + 0.5, isDrafter });
    }
    return found;
  }

  drawRows() {
    const width = this.box.clientWidth;
    const order = this.model.order;
    const tall = this.rowHeight;
    const all = order.length * tall;
    this.spacer.style.height = `${all}px`;
    const height = Math.min(all, 480);
    const g = prepare(this.body, width, Math.max(1, height));
    const scroll = this.rows.scrollTop;
    const first = Math.floor(scroll / tall);
    const last = Math.min(order.length, Math.ceil((scroll + height) / tall));
    for (let row = first; row < last; row++) this.drawRow(g, order[row], row * tall - scroll, tall, row);
    g.save();
    g.beginPath();
    g.rect(this.gutter, 0, width, height);
    g.clip();
    this.drawLines(g, { step: 0, drafter: 0 }, height);
    g.restore();
  }

  drawRow(g, lane, y, tall, row) {
    const paint = colours();
    const left = this.gutter;
    const [from, to] = this.span();
    const end = Math.min(to, this.heard);
    const thick = tall > 20 ? Math.round(tall * 0.42) : tall - 4;
    const top = y + 3;
    g.fillStyle = row === this.selected.row && document.activeElement === this.box ? paint.accent : paint.soft;
    g.font = font(11);
    g.textAlign = "right";
    g.textBaseline = "middle";
    g.fillText(lane.name, left - 6, top + thick / 2, left - 8);
    g.fillStyle = paint.sunken;
    g.fillRect(left, top, this.box.clientWidth - left, thick);
    for (let index = Math.max(0, lane.find(from)); index < lane.at.length; index++) {
      const begins = lane.at[index];
      if (begins > end) break;
      if (lane.duty[index] === OVER) continue;
      const ends = index + 1 < lane.at.length ? lane.at[index + 1] : end;
      const a = Math.max(left, this.x(begins));
      const b = Math.min(this.x(end), this.x(ends));
      g.fillStyle = paint[DUTIES[lane.duty[index]]];
      g.fillRect(a, top, Math.max(0.75, b - a), thick);
    }
    const kept = Math.min(this.x(lane.unknown), this.box.clientWidth);
    if (kept > left) hatch(g, left, top, kept - left, thick);
    this.drawUnknown(g, top, thick);
    if (tall > 20) this.drawBatch(g, lane, top + thick + 1, tall - thick - 7);
    for (const mark of lane.marks) {
      if (mark.at < from || mark.at > to || (mark.kind === "strategy" && tall <= 20)) continue;
      this.drawMark(g, mark, Math.round(this.x(mark.at)) + 0.5, top, thick);
    }
  }

  drawBatch(g, lane, top, tall) {
    const [from, right] = this.span();
    const end = Math.min(right, this.heard);
    g.fillStyle = colours().batch;
    for (let index = Math.max(0, lastBefore(lane.batchAt, from)); index < lane.batchAt.length; index++) {
      const until = lane.batchAt[index];
      if (until > end + 1) break;
      // told about the time before: from the last word, or the change that began the duty, to its end
      const [begins, ends] = lane.rolloutAt(until);
      const since = Math.max(index ? lane.batchAt[index - 1] : 0, until - 2, begins, from);
      const to = Math.min(until, ends, end);
      if (to <= since) continue;
      const a = this.x(since);
      const b = this.x(to);
      const height = Math.max(1, (lane.rows[index] / this.model.mostRows) * tall);
      g.fillRect(a, top + tall - height, Math.max(0.75, b - a), height);
    }
  }

  drawMark(g, mark, x, top, thick) {
    const paint = colours();
    if (mark.kind === "strategy") {
      g.fillStyle = paint.ink;
      g.beginPath();
      g.moveTo(x - 3, top + thick + 6);
      g.lineTo(x + 3, top + thick + 6);
      g.lineTo(x, top + thick + 1);
      g.fill();
    } else if (mark.kind === "lost") {
      g.strokeStyle = paint.ink;
      g.lineWidth = 2;
      g.beginPath();
      g.moveTo(x - 4, top + 2);
      g.lineTo(x + 4, top + thick - 2);
      g.moveTo(x + 4, top + 2);
      g.lineTo(x - 4, top + thick - 2);
      g.stroke();
      g.lineWidth = 1;
    }
  }

  drawAxis() {
    const width = this.box.clientWidth;
    const g = prepare(this.axis, width, AXIS);
    const paint = colours();
    const [from, to] = this.span();
    const step = nice((to - from) / Math.max(2, Math.floor((width - this.gutter) / 90)));
    g.fillStyle = paint.soft;
    g.strokeStyle = paint.line;
    g.font = font(11);
    g.textBaseline = "top";
    for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
      const x = this.x(time);
      g.textAlign = x < this.gutter + 20 ? "left" : x > width - 20 ? "right" : "center";
      g.fillText(step < 1 ? `${number(time, 1)} s` : clock(time), x, 6);
      g.beginPath();
      g.moveTo(x, 0);
      g.lineTo(x, 4);
      g.stroke();
    }
  }

  // --- pointing

  place(event) {
    const box = this.box.getBoundingClientRect();
    const rows = this.rows.getBoundingClientRect();
    const inRows = !this.rows.hidden && event.clientY >= rows.top && event.clientY < rows.bottom;
    const row = inRows ? Math.floor((event.clientY - rows.top + this.rows.scrollTop) / this.rowHeight) : null;
    return { x: event.clientX - box.left, y: event.clientY - box.top, row };
  }

  press(event) {
    if (event.button !== 0 || event.pointerType === "touch") return;
    const { x } = this.place(event);
    if (x < this.gutter) return;
    this.drag = { from: x, to: x };
    this.box.setPointerCapture(event.pointerId);
  }

  move(event) {
    const { x, y, row } = this.place(event);
    if (this.drag) {
      this.drag.to = Math.max(this.gutter, x);
      const [a, b] = [this.drag.from, this.drag.to].sort((one, other) => one - other);
      this.chosen.style.left = `${a}px`;
      this.chosen.style.width = `${b - a}px`;
      show(this.chosen, b - a > 4);
    }
    this.point(x < this.gutter ? null : { x, y, row });
  }

  release() {
    if (!this.drag) return;
    const [a, b] = [this.drag.from, this.drag.to].sort((one, other) => one - other);
    this.cancelDrag();
    if (b - a > 4) this.setSpan(this.time(a), this.time(b));
  }

  cancelDrag() {
    this.drag = null;
    show(this.chosen, false);
  }

  wheel(event) {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    const amount = event.deltaY || event.deltaX;
    this.zoom(amount > 0 ? 1.25 : 0.8, this.time(this.place(event).x));
  }

  point(at) {
    this.hovered = at;
    if (at === null) {
      show(this.tip, false);
      return;
    }
    const time = at.time ?? this.time(at.x);
    const text = at.row === null ? this.tellAll(time) : this.tellLane(this.model.order[at.row], time);
    if (!text) {
      show(this.tip, false);
      return;
    }
    say(this.tip, text);
    show(this.tip, true);
    const width = this.box.clientWidth;
    const left = at.x + 14 + this.tip.offsetWidth > width ? at.x - 14 - this.tip.offsetWidth : at.x + 14;
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${at.y + 14}px`;
  }

  tellAll(time) {
    if (time > this.now || !this.model.order.length) return null;
    if (time > this.heard) return this.tellUnknown(time);
    if (time < this.model.since) return `at ${clock(time)}\nkept of most workers since ${clock(this.model.since)}`;
    const counts = DUTIES.map(() => 0);
    const known = this.model.lanes.filter((lane) => lane.unknown <= time);
    for (const lane of known) {
      const index = lane.find(time);
      if (index >= 0 && lane.duty[index] !== OVER) counts[lane.duty[index]] += 1;
    }
    const parts = DUTIES.flatMap((duty, code) =>
      counts[code] ? [`${count(counts[code])} (${percent(counts[code] / known.length)}) ${NAMES[duty]}`] : [],
    );
    if (known.length < this.model.lanes.length) parts.push(`of ${count(known.length)} workers; of the others it is not kept`);
    return [`at ${clock(time)}`, ...parts, ...this.tellMarks(this.model.marks, time)].join("\n");
  }

  tellLane(lane, time) {
    if (lane && time < lane.unknown) return `${lane.name} at ${clock(time)}\nkept since ${clock(lane.unknown)}`;
    const index = lane?.find(time) ?? -1;
    if (index < 0 || time > this.now) return null;
    if (time > this.heard) return `${lane.name}\n${this.tellUnknown(time)}`;
    const begins = lane.at[index];
    const known = lane.at[index + 1];
    const ends = known ?? this.heard;
    const duty = lane.duty[index];
    const what = duty === OVER ? "the run is over" : NAMES[DUTIES[duty]];
    const lines = [`${lane.name}: ${what}`];
    if (duty !== OVER) {
      const since = `${seconds(ends - begins)}${known === undefined ? (this.live ? " by now" : " until it was last heard of") : ""}`;
      lines.push(`${clock(begins)} to ${clock(ends)}, ${since}`);
    }
    const rows = DUTIES[duty] === "rollout" ? lane.batch(time + 1) : null;
    if (rows !== null) lines.push(`${number(rows, 1)} rows at once`);
    const strategies = lane.marks.filter((mark) => mark.kind === "strategy" && mark.at <= time);
    if (strategies.length && DUTIES[duty] === "rollout") lines.push(`decodes with ${strategies.at(-1).text}`);
    const others = lane.marks.filter((mark) => mark.kind !== "strategy");
    return [...lines, ...this.tellMarks([...this.model.marks, ...others], time)].join("\n");
  }

  tellUnknown(time) {
    return `at ${clock(time)}\nnothing was heard after ${clock(this.heard)}`;
  }

  tellMarks(marks, time) {
    const [from, to] = this.span();
    const near = (4 * (to - from)) / this.box.clientWidth;
    return marks.filter((mark) => Math.abs(mark.at - time) <= near).map((mark) => `▸ ${mark.text}`).slice(0, 4);
  }

  // --- keys

  key(event) {
    const acts = {
      ArrowLeft: () => this.step(-1),
      ArrowRight: () => this.step(1),
      ArrowUp: () => this.choose(this.selected.row - 1),
      ArrowDown: () => this.choose(this.selected.row + 1),
      Home: () => this.select(this.span()[0]),
      End: () => this.select(this.now),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.all(),
      l: () => this.follow(),
      Enter: () => this.many && this.open(),
      Escape: () => this.point(null),
    };
    const act = event.ctrlKey || event.metaKey || event.altKey ? undefined : acts[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  choose(row) {
    this.selected.row = Math.max(0, Math.min(row, this.model.order.length - 1));
    this.select(this.selected.at ?? this.now);
  }

  // To where the selected worker's duty changes next, or did before.
  step(way) {
    const lane = this.model.order[this.selected.row];
    if (!lane) return;
    const now = this.selected.at ?? this.now;
    const later = lane.at.find((at) => at > now);
    const earlier = lane.at.findLast((at) => at < now);
    this.select((way > 0 ? later : earlier) ?? now);
  }

  select(time) {
    this.selected.at = time;
    const [from, to] = this.span();
    if (time < from || time > to) this.setSpan(time - (to - from) / 2, time + (to - from) / 2);
    const tall = this.rowHeight;
    const y = this.selected.row * tall;
    if (y < this.rows.scrollTop) this.rows.scrollTop = y;
    if (y + tall > this.rows.scrollTop + this.rows.clientHeight) {
      this.rows.scrollTop = y + tall - this.rows.clientHeight;
    }
    const row = this.rows.hidden ? null : this.selected.row;
    this.hovered = { time, x: this.x(time), y: BAND + SHARE + y - this.rows.scrollTop + tall / 2, row };
    this.draw();
    say(this.spoken, this.tip.hidden ? "" : this.tip.textContent);
  }
}

function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const wide = Math.round(width * ratio);
  const tall = Math.round(height * ratio);
  if (canvas.width !== wide || canvas.height !== tall) {
    canvas.width = wide;
    canvas.height = tall;
    canvas.style.height = `${height}px`;
  }
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  return g;
}

function stroke(g, x, top, bottom, colour) {
  g.strokeStyle = colour;
  g.beginPath();
  g.moveTo(x, top);
  g.lineTo(x, bottom);
  g.stroke();
}

function hatch(g, left, top, width, height) {
  const apart = 6;
  g.save();
  g.beginPath();
  g.rect(left, top, width, height);
  g.clip();
  g.strokeStyle = colours().soft;
  g.globalAlpha = 0.6;
  g.beginPath();
  for (let x = Math.floor((left - height) / apart) * apart; x < left + width; x += apart) {
    g.moveTo(x, top + height);
    g.lineTo(x + height, top);
  }
  g.stroke();
  g.restore();
}

function font(size) {
  return `${size}px system-ui, sans-serif`;
}

// 1, 2, 5, 10, 15, 30 and so on, of seconds, minutes and hours
function nice(step) {
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200];
  return steps.find((each) => each >= step) ?? Math.ceil(step / 86400) * 86400;
}
