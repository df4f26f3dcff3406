// Modal dialogs: a confirmation, and cancelling a job with one; pausing needs none.

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
  await request(job, "cancel", error);
}

// Pauses the job, or lets a paused one go on.
export async function pauseJob(job, isPaused, error) {
  await request(job, isPaused ? "resume" : "pause", error);
}

async function request(job, what, error) {
  setText(error, "");
  try {
    await post(`/api/jobs/${encodeURIComponent(job)}/${what}`);
  } catch (refused) {
    setText(error, refused.message);
  }
}
