// Warnings, the most urgent first, each with what to do.

import { card, h, replaceChanged, show } from "./dom.js";

const NAMES = ["Now", "Soon", "Note"];

export class AdviceCard {
  constructor() {
    this.list = h("ul", { class: "advice" });
    this.element = card("Warnings", { id: "warnings", wide: true }, this.list);
  }

  update(all) {
    show(this.element, all.length > 0);
    replaceChanged(this.list, adviceItems(all));
  }
}

export function adviceItems(all) {
  return all
    .toSorted((a, b) => a.urgency - b.urgency)
    .map((one) =>
      h("li", { data: { urgency: one.urgency } }, h("strong", {}, `${NAMES[one.urgency]}: ${one.problem}`), one.remedy),
    );
}
