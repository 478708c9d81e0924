// Jobs: the list, and one job with Flink's four checkpoint tabs, its graph and its failures.
import { h, ask, badge, bytes, copyAs, count, duration, figure, moment, table, tabs, toast } from "/web/ui.js";
import { call, finished, get, post } from "/web/api.js";
import { graph, history, timeline } from "/web/charts.js";

const TABS = ["Graph", "Overview", "History", "Summary", "Configuration", "Exceptions"];
const lastCheckpoint = (job) => job["last-checkpoint"] == null || job["last-checkpoint"] < 0 ? "–" : `#${job["last-checkpoint"]}${job["last-checkpoint-duration"] == null ? "" : `, ${duration(job["last-checkpoint-duration"])}`}`;
const restoredFrom = (job, restored) => !restored ? "no" : `from #${restored.id}${job["last-restore-duration"] == null ? "" : `, ${duration(job["last-restore-duration"])}`}`;
const stateOf = (job) => job.lost ? "LOST" : job.state;
const redraw = () => window.dispatchEvent(new Event("redraw"));

export async function list() {
  const [{ jobs }, overview, config] = await Promise.all([get("/jobs/overview"), get("/overview"), get("/config")]);
  return h("div", { "data-live": "1" }, h("div", { class: "row between" }, h("h1", {}, "Jobs"), config["starts-jobs"] ? h("button", { class: "primary", onclick: () => startJob() }, "Start a job…") : null),
    h("div", { class: "cards" }, figure("Running", count(overview["jobs-running"])), figure("Finished", count(overview["jobs-finished"])), figure("Canceled", count(overview["jobs-cancelled"])), figure("Failed", count(overview["jobs-failed"])), figure("Lost", count(overview["jobs-lost"]))),
    h("div", { class: "card" }, table([
      { title: "Name", cell: (job) => h("a", { href: `#/jobs/${job.jid}` }, job.name) },
      { title: "State", cell: (job) => badge(stateOf(job)) },
      { title: "Started", wide: true, cell: (job) => moment(job["start-time"]) },
      { title: "Duration", number: true, cell: (job) => duration(job.duration) },
      { title: "Last checkpoint", number: true, cell: (job) => lastCheckpoint(job) },
      { title: "Parallelism", number: true, cell: (job) => count(job.parallelism) },
      { title: "Runtime", wide: true, cell: (job) => job.runtime || "–" },
      { title: "Job id", wide: true, cell: (job) => h("code", {}, job.jid) },
    ], jobs, { href: (job) => `#/jobs/${job.jid}`, empty: "No job has reported yet. Start one with: holdfast run job.py:flow --checkpoint-dir DIR --service " + location.origin })),
    copyAs({ CLI: `holdfast run job.py:flow --checkpoint-dir DIR --service ${location.origin}\nflink list -m ${location.host}`, curl: `curl -s ${location.origin}/jobs/overview`,
      Python: `import json, urllib.request\njobs = json.load(urllib.request.urlopen("${location.origin}/jobs/overview"))["jobs"]` }));
}

export async function details(query, id, tab = "Graph") {
  const [job, checkpoints] = await Promise.all([get(`/jobs/${id}`), get(`/jobs/${id}/checkpoints`)]);
  const running = !["FINISHED", "CANCELED", "FAILED"].includes(job.state) && !job.lost;
  const last = checkpoints.latest.completed;
  return h("div", { "data-live": "1" },
    h("div", { class: "row between" }, h("h1", {}, job.name, " ", badge(stateOf(job))), running ? actions(job) : null),
    h("p", { class: "small muted" }, h("code", {}, job.jid), ` · ${job.runtime || "?"} · ${job.backend || "?"} · last report ${moment(job["last-seen"])}`),
    h("div", { class: "cards" }, figure("Duration", duration(job.duration)), figure("Checkpoints", `${count(checkpoints.counts.completed)} done, ${count(checkpoints.counts.failed)} failed`),
      figure("Last checkpoint", last ? `#${last.id}, ${duration(last.end_to_end_duration)}` : "–"), figure("State", last ? bytes(last.state_size) : "–"), figure("Restored", restoredFrom(job, checkpoints.latest.restored))),
    tabs(TABS, tab, (name) => { location.hash = `#/jobs/${id}/${name}`; }),
    await panel(tab, job, checkpoints, query.get("checkpoint")),
    copyAs({ CLI: `holdfast checkpoint list ${job["checkpoint-dir"] || "DIR"}\nflink savepoint -m ${location.host} ${id} savepoints`, curl: `curl -s ${location.origin}/jobs/${id}/checkpoints\ncurl -X POST ${location.origin}/jobs/${id}/savepoints -H 'Content-Type: application/json' -d '{}'`,
      Python: `import savepoint\nsp = savepoint.open(${JSON.stringify(last ? last.external_path || "PATH" : "PATH")})\nprint(sp.operators)` }));
}

async function panel(tab, job, checkpoints, chosen) {
  const { history: records, latest, summary } = checkpoints;
  if (tab === "Graph") return h("div", { class: "card" }, job.vertices.length ? graph(job.vertices, job.plan.nodes, job.operators) : h("div", { class: "empty" }, "The job has not sent its graph."));
  if (tab === "Overview") return h("div", { class: "card" }, table([{ title: "", cell: (row) => row[0] }, { title: "Id", cell: (row) => row[1] ? `#${row[1].id}` : "none" }, { title: "Time", cell: (row) => row[1] ? moment(row[1].trigger_timestamp || row[1].restore_timestamp) : "" }, { title: "Path or cause", cell: (row) => row[1] ? row[1].failure_message || link(row[1].external_path) : "" }],
    [["Latest completed checkpoint", latest.completed], ["Latest failed checkpoint", latest.failed], ["Latest savepoint", latest.savepoint], ["Latest restore", latest.restored]]));
  if (tab === "History") return historyPanel(job, records, chosen);
  if (tab === "Summary") return h("div", { class: "card" }, table([{ title: "", cell: (row) => row[0] }, ...["min", "avg", "max", "p50", "p90", "p95", "p99", "p999"].map((name) => ({ title: name, number: true, cell: (row) => row[2](row[1][name]) }))],
    [["End to end duration", summary.end_to_end_duration, duration], ["Checkpointed data size", summary.checkpointed_size, bytes], ["Full checkpoint data size", summary.state_size, bytes], ["Processed in-flight data", summary.processed_data, bytes], ["Persisted in-flight data", summary.persisted_data, bytes]]));
  if (tab === "Configuration") { const config = await get(`/jobs/${job.jid}/checkpoints/config`); return h("div", { class: "card" }, table([{ title: "Option", cell: (row) => row[0] }, { title: "Value", cell: (row) => h("code", {}, typeof row[1] === "object" ? JSON.stringify(row[1]) : String(row[1])) }], Object.entries(config))); }
  const failures = await get(`/jobs/${job.jid}/exceptions`);
  return h("div", { class: "card" }, failures.exceptionHistory.entries.length ? failures.exceptionHistory.entries.map((entry) => [h("div", { class: "label" }, moment(entry.timestamp)), h("pre", {}, entry.stacktrace)]) : h("div", { class: "empty" }, "No failure was reported."));
}

async function historyPanel(job, records, chosen) {
  const open = (record) => { location.hash = `#/jobs/${job.jid}/History?checkpoint=${record.id}`; };
  const record = chosen === null ? null : records.find((item) => String(item.id) === chosen);
  return h("div", {}, record ? await checkpointDetail(job, record) : null, h("div", { class: "card" }, history(records, "end_to_end_duration", duration, "End to end duration"), history(records, "checkpointed_size", bytes, "Checkpointed data size (what this one stored anew)"), history(records, "alignment_duration", duration, "Longest alignment")),
    h("div", { class: "card" }, table([
      { title: "Id", cell: (item) => h("button", { type: "button", onclick: () => open(item) }, `#${item.id}`) },
      { title: "Status", cell: (record) => badge(record.status) },
      { title: "Acknowledged", number: true, cell: (record) => `${record.num_acknowledged_subtasks}/${record.num_subtasks}` },
      { title: "Trigger time", wide: true, cell: (record) => moment(record.trigger_timestamp) },
      { title: "End to end duration", number: true, cell: (record) => duration(record.end_to_end_duration) },
      { title: "Checkpointed", number: true, cell: (record) => bytes(record.checkpointed_size) },
      { title: "Full size", number: true, cell: (record) => bytes(record.state_size) },
      { title: "Type", wide: true, cell: (record) => record.is_savepoint ? "savepoint" : record.checkpoint_type.toLowerCase().replace("_", " ") },
    ], records)));
}

async function checkpointDetail(job, record) {
  const full = await get(`/jobs/${job.jid}/checkpoints/details/${record.id}`);
  const names = Object.fromEntries(job.vertices.map((vertex) => [vertex.id, vertex.name]));
  const vertices = await Promise.all(Object.keys(full.tasks).map(async (vertex) => [vertex, await get(`/jobs/${job.jid}/checkpoints/details/${record.id}/subtasks/${encodeURIComponent(vertex)}`)]));
  const rows = vertices.flatMap(([vertex, data]) => data.subtasks.filter((subtask) => subtask.status === "completed").map((subtask) => ({ ...subtask, name: `${(names[vertex] || vertex).slice(0, 20)} [${subtask.index}]` })));
  return h("div", { class: "card" }, h("h2", {}, `Checkpoint #${record.id}: where the time went`), record.failure_message ? h("p", { class: "error" }, record.failure_message) : null,
    rows.length ? timeline(full.trigger_timestamp, rows) : h("div", { class: "empty" }, "No subtask details were reported."),
    table([{ title: "Operator", cell: ([vertex]) => names[vertex] || vertex }, { title: "Acknowledged", number: true, cell: ([, task]) => `${task.num_acknowledged_subtasks}/${task.num_subtasks}` }, { title: "Duration", number: true, cell: ([, task]) => duration(task.end_to_end_duration) }, { title: "Checkpointed", number: true, cell: ([, task]) => bytes(task.checkpointed_size) }, { title: "Full size", number: true, cell: ([, task]) => bytes(task.state_size) }], Object.entries(full.tasks)),
    full.external_path ? h("p", {}, "Path: ", link(full.external_path)) : null);
}

function actions(job) {
  const act = (name, run, danger) => h("button", { type: "button", class: danger ? "danger" : null, onclick: async () => { try { await run(); } catch (error) { toast(error.message, true); } redraw(); } }, name);
  return h("div", { class: "row" },
    act("Checkpoint", async () => { const { "request-id": id } = await post(`/jobs/${job.jid}/checkpoints`); toast("Checkpoint triggered"); const done = await finished(`/jobs/${job.jid}/checkpoints/${id}`); toast(`Checkpoint #${done.checkpointId} completed`); }),
    act("Savepoint…", async () => {
      const given = await ask({ title: "Trigger a savepoint", fields: [{ name: "target", label: "Folder below a root (empty: the default)" }, { name: "format", label: "Format", options: ["CANONICAL", "NATIVE"] }], action: "Trigger" });
      if (!given) return;
      const { "request-id": id } = await post(`/jobs/${job.jid}/savepoints`, { "target-directory": given.target || null, formatType: given.format });
      toast("Savepoint triggered"); const done = await finished(`/jobs/${job.jid}/savepoints/${id}`); toast(`Savepoint at ${done.location}`); location.hash = `#/snapshot?path=${encodeURIComponent(done.location)}`;
    }),
    act("Stop…", async () => {
      const given = await ask({ title: "Stop with a savepoint", fields: [{ name: "target", label: "Folder below a root (empty: the default)" }, { name: "drain", label: "Drain (fire all event-time timers; not for resuming)", options: ["no", "yes"] }], action: "Stop the job", danger: true });
      if (!given) return;
      const { "request-id": id } = await post(`/jobs/${job.jid}/stop`, { targetDirectory: given.target || null, drain: given.drain === "yes" });
      const done = await finished(`/jobs/${job.jid}/savepoints/${id}`); toast(`Stopped; savepoint at ${done.location}`);
    }, true),
    job["started-here"] ? act("Rescale…", async () => {
      const given = await ask({ title: "Rescale", text: "The job stops with a savepoint and starts again from it.", fields: [{ name: "parallelism", label: "New parallelism", type: "number", min: 1, value: 2, required: true }], action: "Rescale" });
      if (!given) return;
      const { "request-id": id } = await call(`/jobs/${job.jid}/rescaling?parallelism=${given.parallelism}`, { method: "PATCH" });
      const done = await finished(`/jobs/${job.jid}/rescaling/${id}`); toast("Rescaled"); if (done.jid) location.hash = `#/jobs/${done.jid}`;
    }) : null,
    act("Cancel…", async () => { if (await ask({ title: "Cancel the job?", text: "It stops at once, without a savepoint.", action: "Cancel the job", danger: true })) { await call(`/jobs/${job.jid}?mode=cancel`, { method: "PATCH" }); toast("Canceling"); } }, true));
}

export async function startJob(restore = "") {
  const given = await ask({ title: restore ? "Restore" : "Start a job", text: restore ? `From ${restore}` : null, fields: [{ name: "job", label: "Job file and flow, below the jobs folder", placeholder: "clicks.py:flow", required: true }, { name: "parallelism", label: "Parallelism (empty: as in the job)", type: "number", min: 1 }, { name: "backend", label: "Backend", options: ["rocksdb", "filesystem", "memory"] }, { name: "partly", label: "May state be left behind?", options: ["no", "yes"] }], action: restore ? "Check" : "Start" });
  if (!given) return;
  const body = { job: given.job, restore: restore || null, parallelism: given.parallelism ? Number(given.parallelism) : null, backend: given.backend, allow_non_restored_state: given.partly === "yes" };
  try {
    if (restore) {
      const report = await post("/jobs/check", body);
      const lines = report.lines.map((line) => `${line.verdict}: ${line.operator}${line.state ? `.${line.state}` : ""} ${line.reason || ""}`).join("\n");
      if (!await ask({ title: report.ok ? "This would happen" : "This would be refused", fields: [{ name: "plan", label: "Plan", type: "textarea", value: lines }], action: "Start" })) return;
    }
    const { jid } = await post("/jobs", body);
    toast("Started"); location.hash = `#/jobs/${jid}`;
  } catch (error) { toast(error.message, true); }
}

function link(path) { return path ? h("a", { href: `#/snapshot?path=${encodeURIComponent(path)}`, class: "mono" }, path) : "–"; }
