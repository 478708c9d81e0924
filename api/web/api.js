// Calls to the service. A token, where one is needed, is asked for once and kept for this tab only.
import { ask, toast } from "/web/ui.js";

let asking = null;
const token = () => sessionStorage.getItem("holdfast-token");

export class Problem extends Error {
  constructor(status, body) { super(body.detail || `the service answered ${status}`); this.status = status; this.body = body; }
}

export async function call(path, options = {}) {
  const headers = { Accept: "application/json", ...options.headers };
  if (token()) headers.Authorization = `Bearer ${token()}`;
  if (options.body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { ...options, headers, body: options.body === undefined ? undefined : JSON.stringify(options.body) });
  if (response.status === 401) {
    asking = asking || ask({ title: "This service needs a token", fields: [{ name: "token", label: "Token", type: "password", required: true }], action: "Use it" });
    const given = await asking;
    asking = null;
    if (!given) throw new Problem(401, { detail: "no token given" });
    sessionStorage.setItem("holdfast-token", given.token);
    return call(path, options);
  }
  const body = response.headers.get("content-type")?.includes("json") ? await response.json() : {};
  if (!response.ok) throw new Problem(response.status, body);
  return body;
}

export const get = (path, parameters = {}) => {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  return call(query.size ? `${path}?${query}` : path);
};
// A link to a file: followed as it is, or fetched where a token has to go with it, which a link can't carry.
export const download = (path) => async (event) => {
  if (!token()) return;
  event.preventDefault();
  const response = await fetch(path, { headers: { Authorization: `Bearer ${token()}` } });
  if (!response.ok) { toast((await response.json().catch(() => ({}))).detail || `the service answered ${response.status}`, true); return; }
  const link = document.createElement("a"), name = /filename="([^"]+)"/.exec(response.headers.get("content-disposition") || "");
  link.href = URL.createObjectURL(await response.blob());
  link.download = name ? name[1] : "download";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
};
export const post = (path, body = {}) => call(path, { method: "POST", body });

// Polls an asynchronous operation in Flink's shape until it has ended.
export async function finished(path, every = 500, tries = 600) {
  for (let round = 0; round < tries; round += 1) {
    const answer = await get(path);
    if (answer.status.id === "COMPLETED") {
      const failure = answer.operation && (answer.operation["failure-cause"] || answer.operation.failureCause);
      if (failure) throw new Problem(500, { detail: failure["stack-trace"] });
      return answer.operation || {};
    }
    await new Promise((resolve) => setTimeout(resolve, every));
  }
  throw new Problem(504, { detail: "it did not end in time" });
}
