// Savepoints and checkpoints: the list, one with its states and entries, SQL, edit with preview, diff of two.
import { h, ask, field, badge, bytes, copyAs, count, figure, moment, shown, table, tabs, toast } from "/web/ui.js";
import { call, download, get, post } from "/web/api.js";
import { heatMap } from "/web/charts.js";
import { startJob } from "/web/jobs.js";

export async function list(query) {
  const root = query.get("root") || "";
  const [{ roots }, page] = await Promise.all([get("/api/roots"), get("/api/snapshots", { root, cursor: query.get("cursor") })]);
  return h("div", { "data-live": "1" }, h("div", { class: "row between" }, h("h1", {}, "Savepoints and checkpoints"),
    h("select", { "aria-label": "Root", onchange: (event) => { location.hash = `#/snapshots?root=${encodeURIComponent(event.target.value)}`; } }, roots.map((item) => h("option", { value: item.url, selected: item.url === root }, item.url)))),
  h("div", { class: "card" }, table([
    { title: "Path", cell: (item) => h("a", { href: href(item.path), class: "mono" }, item.relative) },
    { title: "Kind", cell: (item) => badge(item.complete ? item.kind.toUpperCase() : "INCOMPLETE") },
    { title: "Format", wide: true, cell: (item) => item.format || "–" },
    { title: "Job", cell: (item) => item.job_name || "–" },
    { title: "Completed", wide: true, cell: (item) => moment(item.completed_timestamp) },
    { title: "Checkpoint", number: true, cell: (item) => item.checkpoint_id ? `#${item.checkpoint_id}` : "–" },
    { title: "", cell: (item) => item.reason ? h("span", { class: "removed" }, item.reason) : "" },
  ], page.items, { href: (item) => href(item.path), empty: "No savepoint or checkpoint below this root yet." })),
  page.next ? h("a", { href: `#/snapshots?root=${encodeURIComponent(root)}&cursor=${encodeURIComponent(page.next)}` }, "More") : null,
  copyAs({ CLI: `holdfast savepoint list ${root || roots[0].url} --checkpoints`, curl: `curl -s '${location.origin}/api/snapshots?root=${encodeURIComponent(root || roots[0].url)}'`,
    Python: `from savepoint import list_savepoints\nfor found in list_savepoints(${JSON.stringify(root || roots[0].url)}, checkpoints=True, depth=3):\n    print(found.path)` }));
}

export async function details(query) {
  const path = query.get("path");
  const snapshot = await get("/api/snapshot", { path });
  const states = snapshot.operators.flatMap((operator) => operator.states.map((state) => ({ operator, state })));
  const chosen = states.find((item) => item.operator.uid === query.get("operator") && item.state.name === query.get("state")) || states[0];
  const config = await get("/config");
  return h("div", {}, h("div", { class: "row between" }, h("h1", {}, snapshot.relative), h("div", { class: "row" },
    config["starts-jobs"] ? h("button", { class: "primary", onclick: () => startJob(snapshot.path) }, "Restore…") : null,
    operationButton("Verify", snapshot.path, "verify"), operationButton("Rescale…", snapshot.path, "rescale"), operationButton("Convert…", snapshot.path, "convert"), operationButton("Copy…", snapshot.path, "copy"), operationButton("Dispose…", snapshot.path, "dispose"))),
  h("div", { class: "cards" }, figure("Kind", `${snapshot.kind}, ${snapshot.format}`), figure("Job", snapshot.job_name || "–"), figure("Completed", moment(snapshot.completed_timestamp)), figure("Size", bytes(snapshot.size)), figure("Operators", count(snapshot.operators.length))),
  h("div", { class: "card" }, table([
    { title: "Operator", cell: (row) => row.operator.uid }, { title: "State", cell: (row) => h("a", { href: href(path, row) }, row.state.name) }, { title: "Kind", cell: (row) => row.state.kind },
    { title: "Type", wide: true, cell: (row) => h("code", {}, row.state.type) }, { title: "Entries", number: true, cell: (row) => count(row.state.entries) }, { title: "Size", number: true, cell: (row) => bytes(row.state.bytes) },
    { title: "TTL", wide: true, cell: (row) => row.state.ttl ? JSON.stringify(row.state.ttl) : "–" }, { title: "Parallelism", number: true, wide: true, cell: (row) => `${row.operator.parallelism} of ${row.operator.max_parallelism}` },
  ], states, { href: (row) => href(path, row), empty: "It holds no keyed state." })),
  chosen ? await statePanel(path, chosen, query) : null,
  copyAs({ CLI: `holdfast savepoint inspect ${path}\nholdfast savepoint query ${path} "select * from \\"${chosen?.operator.uid}\\".\\"${chosen?.state.name}\\" limit 10"`, curl: `curl -s '${location.origin}/api/snapshot?path=${encodeURIComponent(path)}'`,
    Python: `import savepoint\nsp = savepoint.open(${JSON.stringify(path)})\nprint(sp.read(${JSON.stringify(chosen?.operator.uid)}, ${JSON.stringify(chosen?.state.name)}).read_pandas())`, DuckDB: `select * from '${path}/${chosen?.operator.uid}/keyed/${chosen?.state.name}/*.parquet' limit 10` }));
}

async function statePanel(path, { operator, state }, query) {
  const tab = query.get("tab") || "Entries";
  const here = (changes) => { const next = new URLSearchParams({ path, operator: operator.uid, state: state.name, tab, ...changes }); location.hash = `#/snapshot?${next}`; };
  const names = ["Entries", "Key groups", "Schema", "SQL", "Edit"];
  return h("section", { "aria-label": "State" }, h("h2", {}, `${operator.uid}.${state.name}`), tabs(names, tab, (name) => here({ tab: name })),
    tab === "Entries" ? await entries(path, operator, state, query, here) : tab === "Key groups" ? keyGroups(operator, state)
      : tab === "Schema" ? h("div", { class: "card" }, h("pre", {}, JSON.stringify(state.schema, null, 2))) : tab === "SQL" ? sql(path, operator, state) : edit(path, operator, state));
}

async function entries(path, operator, state, query, here) {
  const page = await get("/api/snapshot/entries", { path, operator: operator.uid, state: state.name, key: query.get("key"), key_group: query.get("key_group"), cursor: query.get("cursor"), limit: 100 });
  const form = h("form", { class: "row", onsubmit: (event) => { event.preventDefault(); const data = new FormData(event.target); here({ key: data.get("key"), key_group: data.get("key_group") }); } },
    field("key", "Key (as JSON or plain text)", query.get("key") || ""), field("key_group", "Key group", query.get("key_group") || "", { size: 9 }), h("button", { class: "primary" }, "Find"), h("button", { type: "button", onclick: () => here({ key: "", key_group: "" }) }, "All"),
    h("span", { class: "muted small" }, "All entries as"), ["parquet", "arrow", "jsonl"].map((format) => { const file = `/api/snapshot/download?${new URLSearchParams({ path, operator: operator.uid, state: state.name, format })}`; return h("a", { href: file, download: "", onclick: download(file) }, { parquet: "Parquet", arrow: "Arrow", jsonl: "JSON lines" }[format]); }));
  return h("div", { class: "card" }, form, table(page.columns.map((column) => ({ title: column.name, cell: (row) => h("span", { class: "mono short", title: column.type }, shown(row[column.name])) })), page.rows, { empty: "No entry matches." }),
    page.next ? h("button", { type: "button", onclick: () => here({ cursor: page.next, key: query.get("key") || "", key_group: query.get("key_group") || "" }) }, "Next page") : null);
}

function keyGroups(operator, state) {
  return h("div", { class: "card" }, state.key_groups && Object.keys(state.key_groups).length ? heatMap(state.key_groups) : h("div", { class: "empty" }, "This snapshot does not record counts by key group; convert it to an open savepoint to see them."),
    state.largest?.length ? [h("h2", {}, "Largest keys"), table([{ title: "Key", cell: (row) => shown(row.key) }, { title: "Bytes", number: true, cell: (row) => bytes(row.bytes) }, { title: "Entries", number: true, cell: (row) => count(row.entries) }], state.largest)] : null,
    h("h2", {}, "Rescale preview"), preview(operator, state));
}

function preview(operator, state) {
  const output = h("div", {});
  const show = (parallelism) => {
    const groups = state.key_groups || {}, loads = Array.from({ length: parallelism }, () => 0);
    for (const [group, entriesIn] of Object.entries(groups)) loads[Math.floor(Number(group) * parallelism / operator.max_parallelism)] += entriesIn;
    output.replaceChildren(table([{ title: "Subtask", cell: (row) => String(row[0]) }, { title: "Key groups", cell: (row) => `${Math.ceil(row[0] * operator.max_parallelism / parallelism)}–${Math.ceil((row[0] + 1) * operator.max_parallelism / parallelism) - 1}` }, { title: "Entries", number: true, cell: (row) => count(row[1]) }], loads.map((load, index) => [index, load])));
  };
  show(operator.parallelism);
  return h("div", {}, h("label", {}, "Parallelism ", h("input", { type: "number", min: 1, max: operator.max_parallelism, value: operator.parallelism, oninput: (event) => { const value = Number(event.target.value); if (value >= 1 && value <= operator.max_parallelism) show(value); } })), output);
}

function sql(path, operator, state) {
  const text = h("textarea", { rows: 4, "aria-label": "SQL" }, `select * from "${operator.uid}"."${state.name}" limit 20`), output = h("div", {});
  const run = async () => {
    try {
      const answer = await post("/api/query", { path, sql: text.value, limit: 500 });
      output.replaceChildren(table(answer.columns.map((column, index) => ({ title: column.name, cell: (row) => h("span", { class: "mono short" }, shown(row[index])) })), answer.rows, { empty: "No rows." }), answer.truncated ? h("p", { class: "muted" }, "Cut at 500 rows.") : "");
    } catch (error) { output.replaceChildren(h("div", { class: "card error" }, error.message)); }
  };
  text.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(); });
  return h("div", { class: "card" }, text, h("p", { class: "row" }, h("button", { class: "primary", type: "button", onclick: run }, "Run"), h("span", { class: "muted small" }, "Ctrl-Enter runs it; read-only, this savepoint only")), output);
}

function edit(path, operator, state) {
  const output = h("div", {});
  const form = h("form", { class: "row" }, field("key", "Key"), state.kind === "map" ? field("map_key", "Map key") : null, h("select", { name: "op", "aria-label": "Operation" }, h("option", {}, "set"), h("option", {}, "delete")), field("value", "New value (JSON)"), field("destination", "New savepoint", `${path.replace(/\/$/, "")}-edited`, { long: true }), h("button", { class: "primary" }, "Preview"));
  const change = (data) => ({ operator: operator.uid, state: state.name, key: parse(data.get("key")), op: data.get("op"), ...(data.has("map_key") ? { map_key: parse(data.get("map_key")) } : {}), ...(data.get("op") === "set" ? { value: parse(data.get("value")) } : {}) });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const data = new FormData(form), body = { source: path, destination: data.get("destination"), changes: [change(data)] };
    try {
      const plan = await post("/api/edit/preview", body);
      output.replaceChildren(h("h2", {}, "This would change"), changesTable(plan.changes), h("p", {}, h("button", { class: "primary", type: "button", onclick: async () => { try { await post("/api/operations", { kind: "edit", ...body }); toast("Writing the new savepoint"); location.hash = "#/operations"; } catch (error) { toast(error.message, true); } } }, "Write the new savepoint")));
    } catch (error) { output.replaceChildren(h("div", { class: "card error" }, error.message)); }
  });
  return h("div", { class: "card" }, h("p", { class: "muted small" }, "An edit writes a new savepoint; this one stays as it is."), form, output);
}

export async function diff(query) {
  const left = query.get("left") || "", right = query.get("right") || "", output = h("div", {});
  const form = h("form", { class: "card row", onsubmit: (event) => { event.preventDefault(); const data = new FormData(event.target); location.hash = `#/diff?${new URLSearchParams({ left: data.get("left"), right: data.get("right") })}`; } }, field("left", "Before (path)", left, { long: true }), field("right", "After (path)", right, { long: true }), h("button", { class: "primary" }, "Compare"));
  if (left && right) {
    try {
      const answer = await post("/api/diff", { left, right, limit: 200 });
      output.append(h("div", { class: "card" }, h("h2", {}, "Totals"), table([{ title: "Operator", cell: (row) => row.operator }, { title: "State", cell: (row) => row.state }, ...["added", "removed", "changed", "same"].map((name) => ({ title: name, number: true, cell: (row) => h("span", { class: row[name] ? name : "" }, count(row[name])) }))], answer.totals, { empty: "They hold the same states." })),
        h("div", { class: "card" }, h("h2", {}, "Changes"), changesTable(answer.changes), answer.truncated ? h("p", { class: "muted" }, "Only the first 200 are shown.") : null));
    } catch (error) { output.append(h("div", { class: "card error" }, error.message)); }
  }
  return h("div", {}, h("h1", {}, "Diff of two savepoints"), form, output, left && right ? copyAs({ CLI: `holdfast savepoint diff ${left} ${right}`, curl: `curl -s -X POST ${location.origin}/api/diff -H 'Content-Type: application/json' -d '${JSON.stringify({ left, right })}'`, Python: `from savepoint import diff\nprint(diff(${JSON.stringify(left)}, ${JSON.stringify(right)}))` }) : null);
}

function changesTable(changes) {
  return table([{ title: "State", cell: (row) => `${row.operator}.${row.state}` }, { title: "Key", cell: (row) => h("span", { class: "mono short" }, shown(row.key) + (row.map_key === undefined || row.map_key === null ? "" : ` / ${shown(row.map_key)}`)) }, { title: "", cell: (row) => h("span", { class: row.change }, row.change) }, { title: "Before", cell: (row) => h("span", { class: "mono short removed" }, row.before === undefined ? "" : shown(row.before)) }, { title: "After", cell: (row) => h("span", { class: "mono short added" }, row.after === undefined ? "" : shown(row.after)) }], changes, { empty: "No entry differs." });
}

function operationButton(label, source, kind) {
  const fields = { rescale: [{ name: "destination", label: "New savepoint (path below a root)", value: `${source}-rescaled`, required: true }, { name: "parallelism", label: "Parallelism", type: "number", min: 1 }, { name: "max_parallelism", label: "Max parallelism (empty: unchanged)", type: "number", min: 1 }],
    convert: [{ name: "destination", label: "New savepoint (path below a root)", value: `${source}-open`, required: true }, { name: "format", label: "Format", options: ["open", "native"] }], copy: [{ name: "destination", label: "Copy to (path below a root)", value: `${source}-copy`, required: true }] }[kind] || [];
  return h("button", { type: "button", class: kind === "dispose" ? "danger" : null, onclick: async () => {
    const given = fields.length || kind === "dispose" ? await ask({ title: label.replace("…", ""), text: kind === "dispose" ? `Delete ${source} for good?` : null, fields, action: label.replace("…", ""), danger: kind === "dispose" }) : {};
    if (!given) return;
    const body = { kind, source, ...given };
    for (const name of ["parallelism", "max_parallelism"]) if (name in body) body[name] = body[name] ? Number(body[name]) : null;
    try { await call("/api/operations", { method: "POST", body }); location.hash = "#/operations"; } catch (error) { toast(error.message, true); }
  } }, label);
}

const parse = (text) => { try { return JSON.parse(text); } catch { return text; } };
const href = (path, row) => `#/snapshot?${new URLSearchParams({ path, ...(row ? { operator: row.operator.uid, state: row.state.name } : {}) })}`;
