// A job's spec, and one to submit.

import { ask, change } from "./api.js";
import { h, say } from "./dom.js";

export async function showSpec(job) {
  const { yaml } = await ask(`/api/jobs/${encodeURIComponent(job)}/spec`);
  open(
    h(
      "form",
      { method: "dialog" },
      h("h2", {}, `Spec of ${job}`),
      h("pre", { class: "question" }, yaml),
      h("div", { class: "ends" }, h("button", { value: "close" }, "Close")),
    ),
  );
}

export async function submitSpec(jobs) {
  const text = h("textarea", { id: "spec", spellcheck: "false", required: true, placeholder: "name: …\npolicy: {path: …}" });
  const complaint = h("p", { class: "complaint", role: "alert" });
  const from = h(
    "select",
    { id: "from" },
    h("option", { value: "" }, "an empty spec"),
    jobs.map((each) => h("option", { value: each.job }, each.job)),
  );
  // what somebody has typed is never overwritten
  let copied = "";
  const copy = async () => {
    say(complaint, "");
    const chosen = from.value;
    try {
      const yaml = chosen ? (await ask(`/api/jobs/${encodeURIComponent(chosen)}/spec`)).yaml : "";
      if (chosen !== from.value) return;
      if (text.value === "" || text.value === copied) {
        text.value = yaml;
        copied = text.value;
      } else say(complaint, "What you have typed stays. Empty the field to begin with another spec.");
    } catch (error) {
      say(complaint, error.message);
    }
  };
  from.addEventListener("change", copy);
  const submit = h("button", { type: "submit", class: "primary" }, "Submit");
  const form = h(
    "form",
    {},
    h("h2", {}, "Submit a job"),
    h("label", { for: "from" }, "Begin with the spec of ", from),
    h("label", { for: "spec" }, "YAML; paths are relative to the session's folder of runs"),
    text,
    complaint,
    h("div", { class: "ends" }, h("button", { type: "button", onclick: () => dialog.close() }, "Back"), submit),
  );
  const dialog = open(form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    say(complaint, "");
    submit.disabled = true;
    try {
      const { job } = await change("/api/jobs", { yaml: text.value });
      dialog.close();
      location.hash = `#/job/${encodeURIComponent(job)}`;
    } catch (error) {
      say(complaint, error.message);
    } finally {
      submit.disabled = false;
    }
  });
  if (jobs.length) {
    from.value = jobs[0].job;
    await copy();
  }
}

function open(content) {
  const dialog = h("dialog", {}, content);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
