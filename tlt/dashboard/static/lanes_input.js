// Pointer and keyboard input on the worker lanes: hovering, dragging, zooming, selecting.

import { setText, show } from "./dom.js";
import { TOP_HEIGHT } from "./lanes_drawing.js";
import { tooltipOfAll, tooltipOfLane } from "./lanes_tooltips.js";

// a shorter drag is a click
const SHORTEST_DRAG = 4;

export class LanesInput {
  constructor(view) {
    this.view = view;
    // the worker and the time that the keyboard has selected
    this.selected = { row: 0, at: null };
    this.hovered = null;
    this.drag = null;
  }

  listen() {
    const { box } = this.view;
    for (const [name, listener] of Object.entries({
      pointerdown: (event) => this.onPointerDown(event),
      pointermove: (event) => this.onPointerMove(event),
      pointerup: () => this.onPointerUp(),
      pointercancel: () => this.cancelDrag(),
      pointerleave: () => this.drag || this.hover(null),
      dblclick: () => this.view.showAll(),
      keydown: (event) => this.onKey(event),
      blur: () => this.hover(null),
    })) {
      box.addEventListener(name, listener);
    }
    box.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
  }

  // --- pointer

  position(event) {
    const { view } = this;
    const box = view.box.getBoundingClientRect();
    const rows = view.rows.getBoundingClientRect();
    const inRows = !view.rows.hidden && event.clientY >= rows.top && event.clientY < rows.bottom;
    const row = inRows ? Math.floor((event.clientY - rows.top + view.rows.scrollTop) / view.rowHeight) : null;
    return { x: event.clientX - box.left, y: event.clientY - box.top, row };
  }

  onPointerDown(event) {
    if (event.button !== 0 || event.pointerType === "touch") return;
    const { x } = this.position(event);
    if (x < this.view.gutter) return;
    this.drag = { from: x, to: x };
    this.view.box.setPointerCapture(event.pointerId);
  }

  onPointerMove(event) {
    const { x, y, row } = this.position(event);
    if (this.drag) {
      this.drag.to = Math.max(this.view.gutter, x);
      const [a, b] = this.dragged();
      const { selection } = this.view;
      selection.style.left = `${a}px`;
      selection.style.width = `${b - a}px`;
      show(selection, b - a > SHORTEST_DRAG);
    }
    this.hover(x < this.view.gutter ? null : { x, y, row });
  }

  onPointerUp() {
    if (!this.drag) return;
    const [a, b] = this.dragged();
    this.cancelDrag();
    if (b - a > SHORTEST_DRAG) this.view.setSpan(this.view.time(a), this.view.time(b));
  }

  dragged() {
    const { from, to } = this.drag;
    return [Math.min(from, to), Math.max(from, to)];
  }

  cancelDrag() {
    this.drag = null;
    show(this.view.selection, false);
  }

  onWheel(event) {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    const amount = event.deltaY || event.deltaX;
    this.view.zoom(amount > 0 ? 1.25 : 0.8, this.view.time(this.position(event).x));
  }

  // --- tooltip

  hover(at) {
    this.hovered = at;
    this.updateTooltip();
  }

  updateTooltip() {
    const { view, hovered } = this;
    const text = hovered === null ? null : this.tooltipText(hovered);
    show(view.tooltip, Boolean(text));
    if (!text) return;
    setText(view.tooltip, text);
    const width = view.tooltip.offsetWidth;
    const fits = hovered.x + 14 + width <= view.box.clientWidth;
    view.tooltip.style.left = `${Math.max(0, fits ? hovered.x + 14 : hovered.x - 14 - width)}px`;
    view.tooltip.style.top = `${hovered.y + 14}px`;
  }

  tooltipText({ x, time = this.view.time(x), row }) {
    return row === null ? tooltipOfAll(this.view, time) : tooltipOfLane(this.view, this.view.model.order[row], time);
  }

  // --- keyboard

  onKey(event) {
    const { view } = this;
    const actions = {
      ArrowLeft: () => this.selectChange(-1),
      ArrowRight: () => this.selectChange(1),
      ArrowUp: () => this.selectRow(this.selected.row - 1),
      ArrowDown: () => this.selectRow(this.selected.row + 1),
      Home: () => this.selectTime(view.span()[0]),
      End: () => this.selectTime(view.now),
      "+": () => view.zoom(0.5),
      "=": () => view.zoom(0.5),
      "-": () => view.zoom(2),
      0: () => view.showAll(),
      l: () => view.follow(),
      Enter: () => view.hasManyLanes && view.toggleLanes(),
      Escape: () => this.hover(null),
    };
    const act = event.ctrlKey || event.metaKey || event.altKey ? undefined : actions[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  isSelected(row) {
    return row === this.selected.row && document.activeElement === this.view.box;
  }

  selectRow(row) {
    this.selected.row = Math.max(0, Math.min(row, this.view.model.order.length - 1));
    this.selectTime(this.selected.at ?? this.view.now);
  }

  // Selects the next change of the selected worker's duty, or the previous one.
  selectChange(direction) {
    const lane = this.view.model.order[this.selected.row];
    if (!lane) return;
    const now = this.selected.at ?? this.view.now;
    const later = lane.at.find((at) => at > now);
    const earlier = lane.at.findLast((at) => at < now);
    this.selectTime((direction > 0 ? later : earlier) ?? now);
  }

  selectTime(time) {
    const { view } = this;
    this.selected.at = time;
    const [from, to] = view.span();
    if (time < from || time > to) view.setSpan(time - (to - from) / 2, time + (to - from) / 2);
    const height = view.rowHeight;
    const y = this.selected.row * height;
    if (y < view.rows.scrollTop) view.rows.scrollTop = y;
    if (y + height > view.rows.scrollTop + view.rows.clientHeight) view.rows.scrollTop = y + height - view.rows.clientHeight;
    const row = view.rows.hidden ? null : this.selected.row;
    this.hovered = { time, x: view.x(time), y: TOP_HEIGHT + y - view.rows.scrollTop + height / 2, row };
    view.draw();
    setText(view.announced, view.tooltip.hidden ? "" : view.tooltip.textContent);
  }
}
