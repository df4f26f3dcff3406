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
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption ?? "table" }, made);
}

export function card(title, { id, note, wide } = {}, ...children) {
  return h(
    "section",
    { class: wide ? "card wide" : "card", id, "aria-labelledby": id && `${id}-title` },
    h("header", {}, h("h2", { id: id && `${id}-title` }, title), note ?? null),
    ...children,
  );
}
