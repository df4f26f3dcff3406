// Warnings, the most urgent first, each with what to do.

import { h } from "./dom.js";

const NAMES = ["Now", "Soon", "Note"];

// What the session's page and each of its jobs' warns of.
export function aboutSession(session) {
  if (session.up) return session.advice;
  return [{ urgency: 0, what: `The session '${session.name}' is down.`, do: "`tlt up` starts it again; its jobs go on where they were." }];
}

export function advice(all) {
  return [...all]
    .sort((a, b) => a.urgency - b.urgency)
    .map((one) =>
      h("li", { data: { urgency: one.urgency } }, h("strong", {}, `${NAMES[one.urgency]}: ${one.what}`), one.do),
    );
}
