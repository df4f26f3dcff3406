// The token goes into a cookie that no script reads.
import { change } from "./api.js";

const form = document.querySelector("#login");
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const complaint = document.querySelector("#complaint");
  complaint.textContent = "";
  try {
    await change("/login", { token: document.querySelector("#token").value });
    location.assign("/");
  } catch (error) {
    complaint.textContent = error.message;
  }
});
