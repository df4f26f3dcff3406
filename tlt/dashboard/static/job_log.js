// The job's log, kept at its newest line unless the user has scrolled up.

import { card, h, show } from "./dom.js";
import { clock } from "./format.js";

const LINES = 2000;

export class LogCard {
  constructor() {
    this.last = 0;
    this.lines = h("pre", { class: "log", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "log" });
    this.followButton = h("button", { type: "button", hidden: true, onclick: () => this.follow() }, "Follow the newest");
    this.lines.addEventListener("scroll", () => show(this.followButton, !this.atEnd));
    this.element = card("Log", { id: "log", wide: true, note: this.followButton }, this.lines);
  }

  get atEnd() {
    return this.lines.scrollTop + this.lines.clientHeight >= this.lines.scrollHeight - 24;
  }

  follow() {
    this.lines.scrollTop = this.lines.scrollHeight;
  }

  // Lines are [number, time, text]; numbers start again where the journal was read again.
  update(lines) {
    const follows = this.atEnd;
    if (!lines.length || lines[0][0] > this.last + 1 || lines.at(-1)[0] < this.last) {
      this.lines.replaceChildren();
      this.last = 0;
    }
    const added = lines.filter(([number]) => number > this.last);
    this.lines.append(...added.map(([, at, text]) => h("span", {}, h("span", { class: "at" }, `${clock(at).padStart(6)}  `), `${text}\n`)));
    while (this.lines.childElementCount > LINES) this.lines.firstElementChild.remove();
    this.last = lines.at(-1)?.[0] ?? 0;
    if (follows) this.follow();
  }
}
