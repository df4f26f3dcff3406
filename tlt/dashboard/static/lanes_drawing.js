// Draws the worker lanes on three canvases: shares of all workers, a lane for each, the time axis.

import { clock, number } from "./format.js";
import { OVER, lastBefore } from "./lane_model.js";
import { DUTIES } from "./names.js";
import { colours } from "./theme.js";

// heights: names of steps above the shares, the shares, the axis, and the visible lanes
const NAMES = 18;
const SHARES = 54;
const AXIS = 20;
const MOST_ROWS_HEIGHT = 480;
// lanes that are lower than this have no batch sizes and no marks of strategies
const LOW_ROW = 20;
export const TOP_HEIGHT = NAMES + SHARES;

export class LanesDrawing {
  constructor(view) {
    this.view = view;
  }

  draw() {
    this.drawTop();
    if (!this.view.rows.hidden) this.drawRows();
    this.drawAxis();
  }

  drawTop() {
    const { view } = this;
    const width = view.box.clientWidth;
    const g = prepare(view.top, width, TOP_HEIGHT + 6);
    const paint = colours();
    const left = view.gutter;
    const pixels = Math.max(1, Math.floor(width - left));
    g.fillStyle = paint.inset;
    g.fillRect(left, NAMES, pixels, SHARES);
    const known = Math.max(0, Math.floor(view.x(view.model.sharesSince) - left));
    this.drawShares(g, left, known, pixels);
    g.fillStyle = paint.muted;
    g.font = font(11);
    g.textAlign = "right";
    g.textBaseline = "middle";
    g.fillText("all", left - 6, NAMES + SHARES / 2);
    if (known) hatch(g, left, NAMES, Math.min(known, pixels), SHARES);
    this.drawUnknown(g, NAMES, SHARES);
    this.drawLines(g, { step: 2, drafter: 10 }, TOP_HEIGHT);
    this.drawStepNames(g);
  }

  drawShares(g, left, known, pixels) {
    const { view } = this;
    const [from, to] = view.span();
    const total = view.model.order.length || 1;
    const shares = view.model.shares(from, to, Math.min(to, view.knownUntil), pixels);
    const unknown = shares.at(-1);
    const base = new Float64Array(pixels);
    const paint = colours();
    DUTIES.forEach((duty, code) => {
      g.fillStyle = paint[duty];
      for (let x = known; x < pixels; x++) {
        const height = (shares[code][x] / (total - unknown[x])) * SHARES;
        if (height <= 0) continue;
        g.fillRect(left + x, TOP_HEIGHT - base[x] - height, 1, height);
        base[x] += height;
      }
    });
  }

  // Hatches the time after the last entry.
  drawUnknown(g, top, height) {
    const { view } = this;
    const a = Math.max(view.gutter, view.x(view.knownUntil));
    const b = view.x(view.now);
    if (b > a) hatch(g, a, top, b - a, height);
  }

  // Names steps where there is room.
  drawStepNames(g) {
    let free = -Infinity;
    g.fillStyle = colours().muted;
    g.textBaseline = "middle";
    g.textAlign = "left";
    g.font = font(11);
    for (const { mark, x, isDrafter } of this.visibleMarks()) {
      if (isDrafter || x <= free) continue;
      const name = mark.kind === "eval" ? "eval" : mark.text;
      g.fillText(name, x + 3, 8);
      free = x + 10 + g.measureText(name).width;
    }
  }

  // Draws lines for steps and drafters over the whole height.
  drawLines(g, tops, height) {
    const paint = colours();
    let free = -Infinity;
    for (const { x, isDrafter } of this.visibleMarks()) {
      if (!isDrafter) {
        g.globalAlpha = 0.5;
        stroke(g, x, tops.step, height, paint.muted);
        g.globalAlpha = 1;
      } else if (x >= free) {
        // lines that are too close would hide the duties
        free = x + 5;
        // a solid line under the dashes sets them off from any duty's colour
        stroke(g, x, tops.drafter, height, paint.card);
        g.setLineDash([4, 3]);
        stroke(g, x, tops.drafter, height, paint.drafter);
        g.setLineDash([]);
      }
    }
  }

  // Returns the marks of all workers within the span, and their x.
  visibleMarks() {
    const { view } = this;
    const [from, to] = view.span();
    return view.model.marks
      .filter(({ at, kind }) => at >= from && at <= to && ["step", "eval", "drafter", "speculation"].includes(kind))
      .map((mark) => ({ mark, x: Math.round(view.x(mark.at)) + 0.5, isDrafter: mark.kind === "drafter" || mark.kind === "speculation" }));
  }

  drawRows() {
    const { view } = this;
    const width = view.box.clientWidth;
    const { order } = view.model;
    const rowHeight = view.rowHeight;
    const all = order.length * rowHeight;
    view.spacer.style.height = `${all}px`;
    const height = Math.min(all, MOST_ROWS_HEIGHT);
    const g = prepare(view.body, width, Math.max(1, height));
    const scroll = view.rows.scrollTop;
    const first = Math.floor(scroll / rowHeight);
    const last = Math.min(order.length, Math.ceil((scroll + height) / rowHeight));
    for (let row = first; row < last; row++) this.drawRow(g, order[row], row * rowHeight - scroll + 3, row);
    g.save();
    g.beginPath();
    g.rect(view.gutter, 0, width, height);
    g.clip();
    this.drawLines(g, { step: 0, drafter: 0 }, height);
    g.restore();
  }

  drawRow(g, lane, top, row) {
    const { view } = this;
    const paint = colours();
    const left = view.gutter;
    const [from, to] = view.span();
    const rowHeight = view.rowHeight;
    const isLow = rowHeight <= LOW_ROW;
    const thickness = isLow ? rowHeight - 4 : Math.round(rowHeight * 0.42);
    g.fillStyle = view.input.isSelected(row) ? paint.accent : paint.muted;
    g.font = font(11);
    g.textAlign = "right";
    g.textBaseline = "middle";
    g.fillText(lane.name, left - 6, top + thickness / 2, left - 8);
    g.fillStyle = paint.inset;
    g.fillRect(left, top, view.box.clientWidth - left, thickness);
    this.drawDuties(g, lane, top, thickness);
    const kept = Math.min(view.x(lane.unknownUntil), view.box.clientWidth);
    if (kept > left) hatch(g, left, top, kept - left, thickness);
    this.drawUnknown(g, top, thickness);
    if (!isLow) this.drawBatchSizes(g, lane, top + thickness + 1, rowHeight - thickness - 7);
    for (const mark of lane.marks) {
      if (mark.at < from || mark.at > to || (mark.kind === "strategy" && isLow)) continue;
      drawMark(g, mark.kind, Math.round(view.x(mark.at)) + 0.5, top, thickness);
    }
  }

  drawDuties(g, lane, top, thickness) {
    const { view } = this;
    const paint = colours();
    const [from, to] = view.span();
    const end = Math.min(to, view.knownUntil);
    for (let index = Math.max(0, lane.find(from)); index < lane.at.length; index++) {
      const begins = lane.at[index];
      if (begins > end) break;
      if (lane.duty[index] === OVER) continue;
      const ends = index + 1 < lane.at.length ? lane.at[index + 1] : end;
      const a = Math.max(view.gutter, view.x(begins));
      const b = Math.min(view.x(end), view.x(ends));
      g.fillStyle = paint[DUTIES[lane.duty[index]]];
      g.fillRect(a, top, Math.max(0.75, b - a), thickness);
    }
  }

  drawBatchSizes(g, lane, top, height) {
    const { view } = this;
    const [from, right] = view.span();
    const end = Math.min(right, view.knownUntil);
    g.fillStyle = colours().batch;
    for (let index = Math.max(0, lastBefore(lane.batchAt, from)); index < lane.batchAt.length; index++) {
      const until = lane.batchAt[index];
      if (until > end + 1) break;
      // a batch size is of the time before its report, back to the last report or the rollout's beginning
      const [begins, ends] = lane.rolloutAt(until);
      const since = Math.max(index ? lane.batchAt[index - 1] : 0, until - 2, begins, from);
      const to = Math.min(until, ends, end);
      if (to <= since) continue;
      const a = view.x(since);
      const b = view.x(to);
      const barHeight = Math.max(1, (lane.rows[index] / view.model.mostRows) * height);
      g.fillRect(a, top + height - barHeight, Math.max(0.75, b - a), barHeight);
    }
  }

  drawAxis() {
    const { view } = this;
    const width = view.box.clientWidth;
    const g = prepare(view.axis, width, AXIS);
    const paint = colours();
    const [from, to] = view.span();
    const step = tickInterval((to - from) / Math.max(2, Math.floor((width - view.gutter) / 90)));
    g.fillStyle = paint.muted;
    g.font = font(11);
    g.textBaseline = "top";
    for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
      const x = view.x(time);
      g.textAlign = x < view.gutter + 20 ? "left" : x > width - 20 ? "right" : "center";
      g.fillText(step < 1 ? `${number(time, 1)} s` : clock(time), x, 6);
      stroke(g, x, 0, 4, paint.line);
    }
  }
}

// A triangle for a strategy, a cross for a lost worker.
function drawMark(g, kind, x, top, thickness) {
  const paint = colours();
  if (kind === "strategy") {
    g.fillStyle = paint.text;
    g.beginPath();
    g.moveTo(x - 3, top + thickness + 6);
    g.lineTo(x + 3, top + thickness + 6);
    g.lineTo(x, top + thickness + 1);
    g.fill();
  } else if (kind === "lost") {
    g.strokeStyle = paint.text;
    g.lineWidth = 2;
    g.beginPath();
    g.moveTo(x - 4, top + 2);
    g.lineTo(x + 4, top + thickness - 2);
    g.moveTo(x + 4, top + 2);
    g.lineTo(x - 4, top + thickness - 2);
    g.stroke();
    g.lineWidth = 1;
  }
}

// Sizes a canvas for the screen's pixels and clears it.
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
  const distance = 6;
  g.save();
  g.beginPath();
  g.rect(left, top, width, height);
  g.clip();
  g.strokeStyle = colours().muted;
  g.globalAlpha = 0.6;
  g.beginPath();
  for (let x = Math.floor((left - height) / distance) * distance; x < left + width; x += distance) {
    g.moveTo(x, top + height);
    g.lineTo(x + height, top);
  }
  g.stroke();
  g.restore();
}

function font(size) {
  return `${size}px system-ui, sans-serif`;
}

// Returns a round number of seconds, minutes or hours that is not below `seconds`.
function tickInterval(seconds) {
  const intervals = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200];
  return intervals.find((each) => each >= seconds) ?? Math.ceil(seconds / 86400) * 86400;
}
