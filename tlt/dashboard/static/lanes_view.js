// The worker lanes: the share of all workers at each duty on top, then a lane for each worker.

import { card, h, setText, show } from "./dom.js";
import { clock, count, plural, words } from "./format.js";
import { LanesDrawing } from "./lanes_drawing.js";
import { LanesInput } from "./lanes_input.js";
import { DUTIES } from "./names.js";
import { onTheme } from "./theme.js";

// more lanes are hidden until the user opens them
const MANY = 32;
// seconds that are shown while the newest is followed
const FOLLOWED_SECONDS = 600;
const SHORTEST_SPAN = 0.5;

export class LanesView {
  constructor(model) {
    this.model = model;
    this.now = 0;
    // the duties of workers are not known after this time
    this.knownUntil = 0;
    this.live = false;
    // from and to in seconds since the run began; null: everything, or the newest while it is followed
    this.window = null;
    // whether the right edge moves with the time
    this.follows = true;
    this.opened = false;
    this.drawing = new LanesDrawing(this);
    this.input = new LanesInput(this);
    this.makeElements();
    this.card = this.makeCard();
    this.input.listen();
    this.removeThemeListener = onTheme(() => this.draw());
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.box);
  }

  makeElements() {
    this.top = h("canvas");
    this.axis = h("canvas");
    this.body = h("canvas");
    this.spacer = h("div", { class: "spacer" });
    this.rows = h("div", { class: "rows" }, this.spacer, this.body);
    this.rows.addEventListener("scroll", () => this.drawing.drawRows());
    this.tooltip = h("div", { class: "tooltip", hidden: true });
    // screen readers announce what the keyboard selects, not what a pointer passes over
    this.announced = h("p", { class: "visually-hidden", role: "status" });
    this.selection = h("div", { class: "selection", hidden: true });
    this.box = h(
      "div",
      {
        class: "lanes",
        tabindex: "0",
        role: "application",
        "aria-label":
          "Worker lanes. Left and right: from one duty to the next. Up and down: another worker. Plus and minus: zoom. 0: everything. L: follow.",
      },
      this.top,
      this.rows,
      this.axis,
      this.selection,
      this.tooltip,
      this.announced,
    );
  }

  makeCard() {
    const tool = (label, title, act) => h("button", { type: "button", title, onclick: act }, label);
    this.followButton = tool("Live", "Follow the newest (L)", () => this.follow());
    this.openButton = h("button", { type: "button", onclick: () => this.toggleLanes() });
    this.note = h("span", { class: "hint" });
    const entry = (name, text) => h("span", {}, h("i", { class: `swatch-${name}` }), text);
    this.unknownEntry = entry("unknown", "unknown: no journal entry, or not kept");
    const legend = h(
      "div",
      { class: "legend" },
      DUTIES.map((duty) => entry(duty, words(duty))),
      entry("batch", "running answers"),
      entry("drafter", "drafter in use, or speculation paused"),
      entry("strategy", "another strategy"),
      entry("lost", "lost"),
      this.unknownEntry,
    );
    const tools = h(
      "div",
      { class: "tools" },
      this.openButton,
      tool("−", "Zoom out (−)", () => this.zoom(2)),
      tool("+", "Zoom in (+)", () => this.zoom(0.5)),
      tool("All", "Everything (0)", () => this.showAll()),
      this.followButton,
    );
    return card(
      "Workers",
      { id: "lanes", wide: true, note: [this.note, h("span", { class: "space" }), tools] },
      h("div", { class: "stack" }, this.box, legend),
    );
  }

  close() {
    this.removeThemeListener();
    this.observer.disconnect();
  }

  update({ now, knownUntil, live }) {
    this.now = now;
    this.knownUntil = knownUntil;
    this.live = live;
    this.draw();
  }

  draw() {
    if (!this.box.isConnected || !this.box.clientWidth) return;
    const workers = this.model.order.length;
    setText(this.openButton, this.opened ? "Close the lanes" : `Open ${count(workers)} lanes`);
    show(this.openButton, this.hasManyLanes);
    show(this.rows, !this.hasManyLanes || this.opened);
    this.followButton.setAttribute("aria-pressed", String(this.live && this.follows));
    this.followButton.disabled = !this.live;
    const [from, to] = this.span();
    setText(this.note, `${plural(workers, "worker")}, ${clock(from)} to ${clock(to)} (min:s)`);
    show(this.unknownEntry, this.knownUntil < this.now || from < this.model.completeSince);
    this.drawing.draw();
    this.input.updateTooltip();
  }

  // --- the time span that is shown

  span() {
    if (this.window !== null && !this.follows) return this.window;
    const followed = this.follows && this.live ? FOLLOWED_SECONDS : Infinity;
    const length = this.window ? this.window[1] - this.window[0] : followed;
    const to = Math.max(this.now, SHORTEST_SPAN);
    return [Math.max(0, to - length), to];
  }

  setSpan(from, to) {
    const length = Math.max(SHORTEST_SPAN, Math.min(to - from, Math.max(this.now, SHORTEST_SPAN)));
    const start = Math.max(0, Math.min(from, this.now - length));
    this.window = [start, start + length];
    this.follows = this.live && this.window[1] >= this.now - 0.02 * length;
    this.draw();
  }

  zoom(factor, around = null) {
    const [from, to] = this.span();
    const middle = around ?? this.input.selected.at ?? (this.follows ? to : (from + to) / 2);
    this.setSpan(middle - (middle - from) * factor, middle + (to - middle) * factor);
  }

  showAll() {
    this.follows = false;
    this.window = null;
    this.draw();
  }

  follow() {
    this.follows = true;
    this.window = null;
    this.draw();
  }

  toggleLanes() {
    this.opened = !this.opened;
    this.draw();
  }

  // --- geometry

  get hasManyLanes() {
    return this.model.order.length > MANY;
  }

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
}
