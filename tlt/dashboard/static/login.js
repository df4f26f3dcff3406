// The login form: the token goes into a cookie that no script can read.
import { post } from "./api.js";

const form = document.querySelector("#login");
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const error = document.querySelector("#error");
  error.textContent = "";
  try {
    await post("/login", { token: document.querySelector("#token").value });
    location.assign("/");
  } catch (refused) {
    error.textContent = refused.message;
  }
});
