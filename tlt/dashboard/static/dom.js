// Elements. Text is only ever set as text nodes: prompts and answers may hold anything.

export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.className = value;
    else if (key === "data") Object.assign(element.dataset, value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...present(children));
  return element;
}

function present(children) {
  return children.flat().filter((child) => child !== null && child !== undefined);
}

export function replace(element, ...children) {
  element.replaceChildren(...present(children));
}

// Replaces only children that differ: a node that is replaced loses focus, selection and scroll position.
// An element with a listener needs a `data-key` that names what the listener acts on.
export function replaceChanged(element, ...children) {
  merge(element, present(children).map((child) => (child instanceof Node ? child : document.createTextNode(child))));
}

function merge(element, nodes) {
  const old = [...element.childNodes];
  const shorter = Math.min(old.length, nodes.length);
  let equalFirst = 0;
  while (equalFirst < shorter && old[equalFirst].isEqualNode(nodes[equalFirst])) equalFirst++;
  let equalLast = 0;
  while (equalLast < shorter - equalFirst && old.at(-1 - equalLast).isEqualNode(nodes.at(-1 - equalLast))) equalLast++;
  const before = old.slice(equalFirst, old.length - equalLast);
  const next = old[old.length - equalLast] ?? null;
  const after = nodes.slice(equalFirst, nodes.length - equalLast);
  after.forEach((node, index) => {
    if (index >= before.length) element.insertBefore(node, next);
    else if (!haveSameAttributes(before[index], node)) before[index].replaceWith(node);
    else if (node.nodeType === Node.TEXT_NODE) before[index].data = node.data;
    else merge(before[index], [...node.childNodes]);
  });
  for (const node of before.slice(after.length)) node.remove();
}

function haveSameAttributes(one, other) {
  if (one.nodeName !== other.nodeName) return false;
  if (one.nodeType !== Node.ELEMENT_NODE) return true;
  const names = (node) => node.getAttributeNames().filter((name) => !SCROLLER_ATTRIBUTES.includes(name));
  const [ours, theirs] = [names(one), names(other)];
  return ours.length === theirs.length && ours.every((name) => one.getAttribute(name) === other.getAttribute(name));
}

// Sets only a different text: setting it would remove the selection.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function show(element, visible) {
  element.hidden = !visible;
}

// A left-aligned column; a plain string is a right-aligned one.
export function left(name) {
  return { name, class: "left" };
}

// A table whose rows are renewed; `columns`, `caption` and `empty` may be changed before an update.
export class Table {
  constructor(columns, { caption = null, empty = "Nothing yet." } = {}) {
    this.columns = columns;
    this.caption = caption;
    this.empty = empty;
    this.element = h("div");
  }

  update(rows) {
    replaceChanged(this.element, table(this.columns, rows, this));
  }
}

// Rows are arrays of strings or nodes.
export function table(columns, rows, { caption = null, empty = "Nothing yet." } = {}) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const classes = columns.map((column) => column.class ?? "");
  const head = h(
    "thead",
    {},
    h("tr", {}, columns.map((column, index) => h("th", { scope: "col", class: classes[index] }, column.name ?? column))),
  );
  const body = h(
    "tbody",
    {},
    rows.map((row) => h("tr", {}, row.map((cell, index) => h("td", { class: classes[index] }, cell)))),
  );
  const content = h("table", {}, caption ? h("caption", {}, caption) : null, head, body);
  const scroller = h("div", { class: "scroll" }, content);
  queueMicrotask(() => {
    // a table that was only merged into another is not in the document
    if (!scroller.isConnected) return;
    sizes.observe(scroller);
    sizes.observe(content);
  });
  return scroller;
}

// A table is a keyboard stop only while it scrolls.
const SCROLLER_ATTRIBUTES = ["tabindex", "role", "aria-label"];
const sizes = new ResizeObserver((entries) => {
  for (const scroller of new Set(entries.map((entry) => entry.target.closest(".scroll")))) updateStop(scroller);
});

function updateStop(scroller) {
  const scrolls = scroller.scrollHeight > scroller.clientHeight + 1 || scroller.scrollWidth > scroller.clientWidth + 1;
  const values = scrolls ? ["0", "region", titleOf(scroller)] : [null, null, null];
  SCROLLER_ATTRIBUTES.forEach((name, index) => {
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
