// Requests to the gateway, and the session that authorizes them.

let csrf = null;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const answer = async (response) => {
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new Refused(response.status, body?.error?.message ?? `status ${response.status}`);
  return body;
};

const remember = (state) => {
  csrf = state.csrf;
  return state;
};

export const getJson = async (path) => answer(await fetch(path, { cache: "no-store" }));

// For what changes something: the token shows that the request comes from this page.
export const act = async (method, path) =>
  answer(await fetch(path, { method, headers: { "x-inferry-csrf": csrf ?? "" } }));

export const readSession = async () => remember(await getJson("/admin/session"));

// The key is sent once, in a header, and kept nowhere. A header takes Latin-1 only.
export const signIn = async (key) => {
  if (!/^[\x21-\x7e]+$/.test(key)) throw new Refused(403, "wrong admin key");
  const headers = { authorization: `Bearer ${key}` };
  return remember(await answer(await fetch("/admin/session", { method: "POST", headers })));
};

export const signOut = async () => remember(await answer(await fetch("/admin/session", { method: "DELETE" })));
