// Warnings, the most urgent first, each with what to do.

import { h } from "./dom.js";

const NAMES = ["Now", "Soon", "Note"];

export function advice(all) {
  return [...all]
    .sort((a, b) => a.urgency - b.urgency)
    .map((one) =>
      h("li", { data: { urgency: one.urgency } }, h("strong", {}, `${NAMES[one.urgency]}: ${one.what}`), one.do),
    );
}
