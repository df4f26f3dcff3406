// The theme: light, dark, or that of the system.

import { DUTIES } from "./names.js";

// colours that canvases draw with; those of duties are named as in the journal
const NAMES = [
  ...["text", "muted", "line", "card", "inset", "accent", "batch", "drafter", "bad"],
  ...DUTIES,
  ...["series-1", "series-2", "series-3", "series-4", "band"],
];
const listeners = new Set();
let cache = null;

export function colours() {
  if (cache === null) {
    // light-dark() is resolved only on an element that uses it
    const probe = document.body.appendChild(document.createElement("i"));
    cache = Object.fromEntries(NAMES.map((name) => [name, resolved(probe, name)]));
    probe.remove();
  }
  return cache;
}

function resolved(probe, name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function changed() {
  cache = null;
  for (const listener of listeners) listener();
}

export function chooseTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem("theme", name);
  } catch {
    // without storage, the next visit has the system's theme
  }
  changed();
}

export function chosenTheme() {
  return document.documentElement.dataset.theme ?? "auto";
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
try {
  const saved = localStorage.getItem("theme");
  if (saved === "light" || saved === "dark") document.documentElement.dataset.theme = saved;
} catch {
  // no storage
}
