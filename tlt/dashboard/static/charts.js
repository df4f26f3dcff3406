// uPlot charts in our colours: rebuilt when the theme changes, resized with their box.

import uPlot from "./vendor/uPlot.esm.js";
import { h, replaceChanged, show, table } from "./dom.js";
import { number } from "./format.js";
import { colours, onTheme } from "./theme.js";

const HEIGHT = 170;
// rows of the table of numbers
const ROWS = 500;
const WHOLE_INCREMENTS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];

// `series`: {name, colour, dashed, points, bars, format}; `x`: {name, format}; `band`: two series to fill the area between.
export class Chart {
  constructor(title, { x, series, format = number, band = null, zero = true, top = null, empty = "Nothing yet." }) {
    this.options = { x, series, format, band, zero, top };
    this.data = null;
    this.plot = null;
    this.frame = h("div", { role: "img", "aria-label": title });
    this.placeholder = h("p", { class: "empty" }, empty);
    this.summary = h("summary", {}, "Numbers");
    this.numbers = h("details", { class: "numbers", hidden: true, ontoggle: () => this.updateNumbers() }, this.summary);
    this.element = h("div", { class: "chart" }, h("h3", {}, title), this.frame, this.placeholder, this.numbers);
    this.removeThemeListener = onTheme(() => this.make());
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.element);
  }

  close() {
    this.removeThemeListener();
    this.observer.disconnect();
    this.plot?.destroy();
  }

  // Columns: x, then one for each series.
  set(data) {
    const hasData = data[0].length > 0;
    show(this.placeholder, !hasData);
    show(this.frame, hasData);
    show(this.numbers, hasData);
    const { zoomed } = this;
    this.data = hasData ? data : null;
    if (!hasData) return;
    if (!this.plot) this.make();
    else if (zoomed === null || zoomed.min >= data[0].at(-1)) this.plot.setData(data);
    else {
      this.plot.setData(data, false);
      this.plot.setScale("x", zoomed);
    }
    this.updateNumbers();
  }

  // The x range that the user has zoomed to, or null.
  get zoomed() {
    const { min, max } = this.plot?.scales.x ?? {};
    if (!this.data || min === null || min === undefined) return null;
    const [low, high] = this.range(this.data[0][0], this.data[0].at(-1));
    return min > low || max < high ? { min, max } : null;
  }

  // The same data as a table, for readers who cannot see curves; made only while it is open.
  updateNumbers() {
    if (!this.numbers.open || !this.data) return;
    const { x, series, format } = this.options;
    const [at, ...columns] = this.data.map((column) => column.slice(-ROWS));
    const cell = (value, which) => (value === null || value === undefined ? "–" : (series[which].format ?? format)(value));
    replaceChanged(
      this.numbers,
      this.summary,
      table(
        [x.name, ...series.map(({ name }) => name)],
        at.map((value, index) => [x.format(value), ...columns.map((column, which) => cell(column[index], which))]),
      ),
    );
  }

  resize() {
    const width = Math.floor(this.element.clientWidth);
    if (!width || !this.data) return;
    if (!this.plot) this.make();
    else if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
  }

  // Returns the x range, wider than the data where bars stand around their value.
  range(low, high) {
    const xs = this.data[0];
    if (xs.length === 1) return [xs[0] - 0.5, xs[0] + 0.5];
    const isAll = low === xs[0] && high === xs.at(-1);
    if (!isAll || !this.options.series.some((one) => one.bars)) return [low, high];
    const half = (xs[1] - xs[0]) / 2;
    return [low - half, high + half];
  }

  make() {
    const { zoomed } = this;
    this.plot?.destroy();
    this.plot = null;
    const width = Math.floor(this.element.clientWidth);
    if (!width || !this.data) return;
    const paint = colours();
    const { x, series, format, band, zero, top } = this.options;
    const axis = {
      stroke: paint.muted,
      grid: { stroke: paint.line, width: 1 },
      ticks: { stroke: paint.line, width: 1, size: 4 },
      font: "11px system-ui, sans-serif",
    };
    const range = (_, low, high) => {
      if (low === null) return [0, 1];
      const bottom = zero ? Math.min(0, low) : low;
      const end = Math.max(high, top ?? -Infinity);
      const room = (end - bottom || Math.abs(end) || 1) * 0.06;
      return [bottom === 0 ? 0 : bottom - room, end + room];
    };
    this.plot = new uPlot(
      {
        width,
        height: HEIGHT,
        padding: [8, 10, 0, 0],
        cursor: { points: { size: 6 }, drag: { x: true, y: false } },
        scales: { x: { time: false, range: (_, a, b) => this.range(a, b) }, y: { range } },
        axes: [
          { ...axis, size: 30, space: 60, incrs: x.whole ? WHOLE_INCREMENTS : undefined, values: (_, ticks) => ticks.map((v) => (v === null ? "" : (x.tick ?? x.format)(v))) },
          { ...axis, size: 52, space: 30, values: (_, ticks) => ticks.map((v) => (v === null ? "" : format(v))) },
        ],
        series: [
          { label: x.name, value: (_, v) => (v === null || v === undefined ? "" : x.format(v)) },
          ...series.map((one) => ({
            label: one.name,
            stroke: paint[one.colour],
            fill: one.bars ? paint[one.colour] : undefined,
            width: one.width ?? 2,
            dash: one.dashed ? [5, 4] : undefined,
            spanGaps: true,
            points: { show: one.points ?? undefined, size: 6, fill: paint.card },
            paths: one.bars ? uPlot.paths.bars({ size: [0.9, 60] }) : one.steps ? uPlot.paths.stepped({ align: 1 }) : undefined,
            value: (_, v) => (v === null || v === undefined ? "–" : (one.format ?? format)(v)),
          })),
        ],
        bands: band ? [{ series: band, fill: paint.band }] : undefined,
      },
      this.data,
      this.frame,
    );
    if (zoomed !== null) this.plot.setScale("x", zoomed);
  }
}

// Joins curves with different x values into columns over all x values: null where a curve has no point.
export function joined(curves) {
  const xs = [...new Set(curves.flatMap(([at]) => at))].sort((a, b) => a - b);
  const columns = curves.map(([at, values]) => {
    const known = new Map(at.map((x, index) => [x, values[index]]));
    return xs.map((x) => known.get(x) ?? null);
  });
  return [xs, ...columns];
}
