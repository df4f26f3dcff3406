// A question that has to be answered before something is changed.

import { h } from "./dom.js";

export function ask(title, text, yes) {
  return new Promise((resolve) => {
    const dialog = h(
      "dialog",
      { "aria-labelledby": "question" },
      h(
        "form",
        { method: "dialog" },
        h("h2", { id: "question" }, title),
        h("p", {}, text),
        h(
          "div",
          { class: "ends" },
          h("button", { value: "no", autofocus: true }, "Back"),
          h("button", { value: "yes", class: "danger" }, yes),
        ),
      ),
    );
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue === "yes");
      dialog.remove();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
