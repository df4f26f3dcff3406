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

// The status and the reason with which an address is refused; null where it is not, or nobody answers.
export async function refusal(path) {
  const leave = new AbortController();
  try {
    const response = await fetch(path, { signal: leave.signal });
    if (response.ok) return null;
    const body = await response.json().catch(() => ({}));
    return { status: response.status, why: body.error ?? `refused (${response.status})` };
  } catch {
    return null;
  } finally {
    leave.abort();
  }
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
