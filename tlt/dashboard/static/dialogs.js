// Modal dialogs: a confirmation, and cancelling a job with one.

import { post } from "./api.js";
import { h, setText } from "./dom.js";

export function openDialog(content) {
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, content);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

// Returns whether the user chose `yes`.
function confirm(title, text, yes) {
  const dialog = openDialog(
    h(
      "form",
      { method: "dialog" },
      h("h2", { id: "dialog-title" }, title),
      h("p", {}, text),
      h(
        "div",
        { class: "buttons" },
        h("button", { value: "no", autofocus: true }, "Back"),
        h("button", { value: "yes", class: "danger" }, yes),
      ),
    ),
  );
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"));
  });
}

// Cancels the job if the user confirms it; shows an error in `error`.
export async function cancelJob(job, error) {
  const text = "It ends now. What it has committed stays in its folder: checkpoints, the best policy, the drafter.";
  if (!(await confirm(`Cancel ${job}?`, text, "Cancel the job"))) return;
  setText(error, "");
  try {
    await post(`/api/jobs/${encodeURIComponent(job)}/cancel`);
  } catch (refused) {
    setText(error, refused.message);
  }
}
