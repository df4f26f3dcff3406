// Requests to the dashboard's server.

async function parse(request) {
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

export function get(path) {
  return parse(fetch(path, { headers: { accept: "application/json" } }));
}

// The header is one that no other site's page can send.
export function post(path, body = {}) {
  return parse(
    fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json", "x-tlt": "1" },
      body: JSON.stringify(body),
    }),
  );
}

// Returns the status and reason with which a path is refused, or null where it is not or the server is gone.
export async function refusal(path) {
  const controller = new AbortController();
  try {
    const response = await fetch(path, { signal: controller.signal });
    if (response.ok) return null;
    const body = await response.json().catch(() => ({}));
    return { status: response.status, why: body.error ?? `refused (${response.status})` };
  } catch {
    return null;
  } finally {
    controller.abort();
  }
}
