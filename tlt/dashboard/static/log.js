// The log: what happened, followed to its newest line unless somebody has scrolled up.

import { card, h, show } from "./dom.js";
import { clock } from "./format.js";

export class LogCard {
  constructor() {
    this.last = 0;
    this.lines = h("pre", { class: "logs", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "log" });
    this.newest = h("button", { type: "button", hidden: true, onclick: () => this.follow() }, "Follow the newest");
    this.lines.addEventListener("scroll", () => show(this.newest, !this.atEnd));
    this.element = card("Log", { id: "log", wide: true, note: this.newest }, this.lines);
  }

  get atEnd() {
    return this.lines.scrollTop + this.lines.clientHeight >= this.lines.scrollHeight - 24;
  }

  follow() {
    this.lines.scrollTop = this.lines.scrollHeight;
  }

  update(lines) {
    const follows = this.atEnd;
    if (!lines.length || lines[0][0] > this.last + 1 || lines.at(-1)[0] < this.last) {
      this.lines.replaceChildren();
      this.last = 0;
    }
    const news = lines.filter(([number]) => number > this.last);
    this.lines.append(...news.map(([, at, text]) => h("span", {}, h("span", { class: "at" }, `${clock(at).padStart(6)}  `), `${text}\n`)));
    while (this.lines.childElementCount > 2000) this.lines.firstElementChild.remove();
    this.last = lines.at(-1)?.[0] ?? 0;
    if (follows) this.follow();
  }
}
