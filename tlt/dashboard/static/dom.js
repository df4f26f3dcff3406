// Elements. Text is only ever set as text: prompts and answers may hold anything.

export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.className = value;
    else if (key === "data") Object.assign(element.dataset, value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// As `fill`, but what is alike stays: a node that is replaced loses focus, selection and where it was
// scrolled to. Something with a listener names what it acts on in `data-key`.
export function renew(element, ...children) {
  const there = children.flat().filter((child) => child !== null && child !== undefined);
  merge(element, there.map((child) => (child instanceof Node ? child : document.createTextNode(child))));
  return element;
}

function merge(element, made) {
  const old = [...element.childNodes];
  const most = Math.min(old.length, made.length);
  let first = 0;
  while (first < most && old[first].isEqualNode(made[first])) first++;
  let last = 0;
  while (last < most - first && old.at(-1 - last).isEqualNode(made.at(-1 - last))) last++;
  const was = old.slice(first, old.length - last);
  const after = old[old.length - last] ?? null;
  const becomes = made.slice(first, made.length - last);
  becomes.forEach((node, index) => {
    if (index >= was.length) element.insertBefore(node, after);
    else if (!alike(was[index], node)) was[index].replaceWith(node);
    else if (node.nodeType === Node.TEXT_NODE) was[index].data = node.data;
    else merge(was[index], [...node.childNodes]);
  });
  for (const node of was.slice(becomes.length)) node.remove();
}

function alike(one, other) {
  if (one.nodeName !== other.nodeName) return false;
  if (one.nodeType !== Node.ELEMENT_NODE) return true;
  const names = (node) => node.getAttributeNames().filter((name) => !OF_SCROLLERS.includes(name));
  const [ours, theirs] = [names(one), names(other)];
  return ours.length === theirs.length && ours.every((name) => one.getAttribute(name) === other.getAttribute(name));
}

// Only where it differs: a node that is replaced loses its selection.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function show(element, visible) {
  element.hidden = !visible;
}

// Rows as arrays of strings or nodes; a header names its unit.
export function table(columns, rows, { caption, empty = "Nothing yet." } = {}) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const head = h(
    "thead",
    {},
    h("tr", {}, columns.map((column) => h("th", { scope: "col", class: column.left ? "left" : "" }, column.name))),
  );
  const body = h(
    "tbody",
    {},
    rows.map((row) =>
      h("tr", {}, row.map((cell, index) => h("td", { class: columns[index].left ? "left" : "" }, cell))),
    ),
  );
  const made = h("table", {}, caption ? h("caption", {}, caption) : null, head, body);
  const scroller = h("div", { class: "scroll" }, made);
  queueMicrotask(() => {
    // by now one that another was renewed with is known not to be shown
    if (!scroller.isConnected) return;
    sizes.observe(scroller);
    sizes.observe(made);
  });
  return scroller;
}

// The keyboard stops at a table only where it scrolls.
const OF_SCROLLERS = ["tabindex", "role", "aria-label"];
const sizes = new ResizeObserver((entries) => {
  for (const scroller of new Set(entries.map((entry) => entry.target.closest(".scroll")))) stopAt(scroller);
});

function stopAt(scroller) {
  const scrolls = scroller.scrollHeight > scroller.clientHeight + 1 || scroller.scrollWidth > scroller.clientWidth + 1;
  const values = scrolls ? ["0", "region", titleOf(scroller)] : [null, null, null];
  OF_SCROLLERS.forEach((name, index) => {
    if (values[index] === null) scroller.removeAttribute(name);
    else scroller.setAttribute(name, values[index]);
  });
}

function titleOf(scroller) {
  for (let before = scroller.parentElement; before; before = before.previousElementSibling) {
    if (before.tagName === "H3") return before.textContent;
  }
  return scroller.closest("section").querySelector("h2").textContent;
}

export function card(title, { id, note, wide } = {}, ...children) {
  return h(
    "section",
    { class: wide ? "card wide" : "card", id, "aria-labelledby": id && `${id}-title` },
    h("header", {}, h("h2", { id: id && `${id}-title` }, title), note ?? null),
    ...children,
  );
}
