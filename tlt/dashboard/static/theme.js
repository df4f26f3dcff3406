// Light, dark, or as the system has it.

// those that canvases draw with
const NAMES = [
  ...["ink", "soft", "line", "card", "sunken", "accent", "batch", "drafter", "bad"],
  ...["rollout", "draft", "preempting", "learn", "waiting", "idle", "leaving", "away"],
  ...["series-1", "series-2", "series-3", "series-4", "band"],
];
const listeners = new Set();
let memo = null;

export function colours() {
  if (memo === null) {
    // which of its two a colour is shows only where it is used
    const probe = document.body.appendChild(document.createElement("i"));
    memo = Object.fromEntries(NAMES.map((name) => [name, used(probe, name)]));
    probe.remove();
  }
  return memo;
}

function used(probe, name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function changed() {
  memo = null;
  for (const listener of listeners) listener();
}

export function chooseTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem("theme", name);
  } catch {
    // a browser that keeps nothing has the system's theme next time
  }
  changed();
}

export function chosenTheme() {
  return document.documentElement.dataset.theme ?? "auto";
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
try {
  const kept = localStorage.getItem("theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
} catch {
  // as above
}
