// Requests: what is looked at, and what changes something.

async function answered(request) {
  let response;
  try {
    response = await request;
  } catch {
    throw new Error("The dashboard does not answer.");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error ?? `The dashboard refused (${response.status}).`);
  return body;
}

export function ask(path) {
  return answered(fetch(path, { headers: { accept: "application/json" } }));
}

// The header is one that no other site's page can send.
export function change(path, body = {}) {
  return answered(
    fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json", "x-tlt": "1" },
      body: JSON.stringify(body),
    }),
  );
}
