// Dialogs that show a job's spec and submit a new one.

import { get, post } from "./api.js";
import { openDialog } from "./dialogs.js";
import { h, setText } from "./dom.js";

export async function showSpec(job) {
  const { yaml } = await get(`/api/jobs/${encodeURIComponent(job)}/spec`);
  openDialog(
    h(
      "form",
      { method: "dialog" },
      h("h2", { id: "dialog-title" }, `Spec of ${job}`),
      h("pre", { class: "question" }, yaml),
      h("div", { class: "buttons" }, h("button", { value: "close" }, "Close")),
    ),
  );
}

export async function submitSpec(jobs) {
  const text = h("textarea", { id: "spec", spellcheck: "false", required: true, placeholder: "name: …\npolicy: {path: …}" });
  const error = h("p", { class: "error", role: "alert" });
  const template = h(
    "select",
    { id: "template" },
    h("option", { value: "" }, "an empty spec"),
    jobs.map((each) => h("option", { value: each.job }, each.job)),
  );
  // text that the user has typed is never overwritten
  let copied = "";
  const copy = async () => {
    setText(error, "");
    const chosen = template.value;
    try {
      const yaml = chosen ? (await get(`/api/jobs/${encodeURIComponent(chosen)}/spec`)).yaml : "";
      if (chosen !== template.value) return;
      if (text.value === "" || text.value === copied) {
        text.value = yaml;
        copied = text.value;
      } else setText(error, "Your text is kept. Empty the field to start from another spec.");
    } catch (refused) {
      setText(error, refused.message);
    }
  };
  template.addEventListener("change", copy);
  const submit = h("button", { type: "submit", class: "primary" }, "Submit");
  const form = h(
    "form",
    {},
    h("h2", { id: "dialog-title" }, "Submit a job"),
    h("label", { for: "template" }, "Start from ", template),
    h("label", { for: "spec" }, "YAML; paths are relative to the session's folder of runs"),
    text,
    error,
    h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => dialog.close() }, "Back"), submit),
  );
  const dialog = openDialog(form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    setText(error, "");
    submit.disabled = true;
    try {
      const { job } = await post("/api/jobs", { yaml: text.value });
      dialog.close();
      location.hash = `#/job/${encodeURIComponent(job)}`;
    } catch (refused) {
      setText(error, refused.message);
    } finally {
      submit.disabled = false;
    }
  });
  if (jobs.length) {
    template.value = jobs[0].job;
    await copy();
  }
}
