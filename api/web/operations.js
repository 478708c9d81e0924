// Background operations with their progress and result.
import { h, badge, copyAs, duration, moment, table, toast } from "/web/ui.js";
import { call, get } from "/web/api.js";

export async function list() {
  const { items } = await get("/api/operations", { limit: 100 });
  return h("div", { "data-live": "1" }, h("h1", {}, "Operations"), h("div", { class: "card" }, table([
    { title: "Operation", cell: (item) => item.kind },
    { title: "Status", cell: (item) => badge(item.status) },
    { title: "Progress", wide: true, cell: (item) => h("div", { class: "progress", role: "progressbar", "aria-valuenow": Math.round(item.progress * 100), "aria-valuemin": 0, "aria-valuemax": 100 }, h("i", { width_: `${Math.round(item.progress * 100)}%` })) },
    { title: "Source", wide: true, cell: (item) => h("span", { class: "mono" }, item.arguments.source || "") },
    { title: "Result", cell: (item) => item.result.failure ? h("span", { class: "removed" }, item.result.failure) : item.result.path ? h("a", { class: "mono", href: `#/snapshot?path=${encodeURIComponent(item.result.path)}` }, item.result.path) : item.result.message || "" },
    { title: "Started", wide: true, cell: (item) => moment(item.created) },
    { title: "Took", number: true, cell: (item) => item.ended ? duration(item.ended - item.created) : "" },
    { title: "", cell: (item) => ["QUEUED", "RUNNING"].includes(item.status) ? h("button", { type: "button", class: "danger", onclick: async () => { try { await call(`/api/operations/${item.id}`, { method: "DELETE" }); } catch (error) { toast(error.message, true); } window.dispatchEvent(new Event("redraw")); } }, "Cancel") : null },
  ], items, { empty: "No operation has run yet." })),
  copyAs({ CLI: "holdfast savepoint convert SOURCE DESTINATION", curl: `curl -s ${location.origin}/api/operations\ncurl -X POST ${location.origin}/api/operations -H 'Content-Type: application/json' -d '{"kind": "convert", "source": "SOURCE", "destination": "DESTINATION"}'`,
    Python: `import json, urllib.request\noperations = json.load(urllib.request.urlopen("${location.origin}/api/operations"))["items"]` }));
}
