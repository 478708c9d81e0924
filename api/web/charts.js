// Charts as plain SVG: checkpoint history, barrier timeline, dataflow graph, key-group heat map.
import { h, svg, bytes, count, duration } from "/web/ui.js";

const WIDTH = 900, HEIGHT = 92, LEFT = 62, BOTTOM = 22;

// Bars over time, one per checkpoint; failed ones are red.
export function history(records, field, format, label) {
  const shownRecords = [...records].reverse();
  const largest = Math.max(0, ...shownRecords.map((record) => record[field] || 0)), top = largest || 1;
  const step = (WIDTH - LEFT) / Math.max(shownRecords.length, 1);
  const bars = shownRecords.map((record, index) => {
    const height = Math.max(1.5, (record[field] || 0) / top * (HEIGHT - BOTTOM - 12));
    return svg("rect", { class: record.status === "FAILED" ? "bar bad" : "bar", x: LEFT + index * step + 1, width: Math.max(1, Math.min(step - 2, 26)), y: HEIGHT - BOTTOM - height, height },
      svg("title", {}, document.createTextNode(`#${record.id} ${record.status}: ${format(record[field] || 0)}`)));
  });
  return h("div", {}, h("div", { class: "label" }, label), svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: "100%", role: "img", "aria-label": label },
    svg("line", { class: "axis", x1: LEFT, x2: WIDTH, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
    text(0, 16, format(largest)), text(0, HEIGHT - BOTTOM, "0"), bars,
    shownRecords.length ? [text(LEFT, HEIGHT - 6, `#${shownRecords[0].id}`), text(WIDTH - 46, HEIGHT - 6, `#${shownRecords.at(-1).id}`)] : []));
}

const PARTS = [["wait", "waiting for the barrier"], ["warn", "alignment"], ["", "synchronous part"], ["soft", "asynchronous part"]];

// When the barrier reached each subtask and where its time went: waiting, alignment, synchronous and asynchronous part.
export function timeline(trigger, rows) {
  const end = Math.max(1, ...rows.map((row) => row.end_to_end_duration || 0));
  const scale = (WIDTH - 190) / end, line = 20;
  const parts = rows.map((row, index) => {
    const y = index * line + 4;
    const lengths = [row.start_delay, row.alignment?.duration, row.checkpoint?.sync, row.checkpoint?.async];
    let x = 180;
    const bars = PARTS.map(([kind, name], part) => {
      const length = lengths[part];
      const width = (length || 0) * scale;
      const bar = svg("rect", { class: `bar ${kind}`, x, y, width: Math.max(width, length ? 1 : 0), height: line - 7, rx: 2 }, svg("title", {}, document.createTextNode(`${row.name}: ${name} ${duration(length || 0)}`)));
      x += width;
      return bar;
    });
    return [text(0, y + 11, row.name), bars];
  });
  const legend = PARTS.map(([kind, name]) => h("span", {}, svg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("rect", { class: `bar ${kind}`, width: 12, height: 12, rx: 2 })), name));
  return h("div", {}, h("div", { class: "scroll" }, svg("svg", { viewBox: `0 0 ${WIDTH} ${rows.length * line + 20}`, class: "wide-chart", role: "img", "aria-label": "Barrier timeline" }, parts,
    text(180, rows.length * line + 16, "0"), text(WIDTH - 60, rows.length * line + 16, duration(end)))), h("div", { class: "legend" }, legend));
}

// A source reads nothing from others: what it sends is its figure.
const records = (metrics) => metrics["read-records"] ? `${count(metrics["read-records"])} in` : `${count(metrics["write-records"])} out`;

// The dataflow from left to right; the border tells the back pressure.
export function graph(vertices, nodes, operators) {
  const inputs = Object.fromEntries((nodes || []).map((node) => [node.id, (node.inputs || []).map((input) => input.id)]));
  const depth = {};
  const depthOf = (id, seen = new Set()) => {
    if (depth[id] !== undefined || seen.has(id)) return depth[id] || 0;
    seen.add(id);
    depth[id] = Math.max(-1, ...(inputs[id] || []).map((source) => depthOf(source, seen))) + 1;
    return depth[id];
  };
  vertices.forEach((vertex) => depthOf(vertex.id));
  const columns = {};
  const place = {};
  vertices.forEach((vertex) => { const column = depth[vertex.id] || 0; columns[column] = (columns[column] || 0) + 1; place[vertex.id] = { x: 10 + column * 250, y: 10 + (columns[column] - 1) * 100 }; });
  const width = (Math.max(0, ...Object.values(depth)) + 1) * 250 - 20, height = Math.max(1, ...Object.values(columns)) * 100;
  const edges = (nodes || []).flatMap((node) => (node.inputs || []).filter((input) => place[input.id] && place[node.id]).map((input) => {
    const from = place[input.id], to = place[node.id];
    return svg("path", { class: "edge", d: `M${from.x + 210},${from.y + 40} C${from.x + 232},${from.y + 40} ${to.x - 22},${to.y + 40} ${to.x},${to.y + 40}` }, svg("title", {}, document.createTextNode(input.ship_strategy || "")));
  }));
  const boxes = vertices.map((vertex) => {
    const { x, y } = place[vertex.id], pressure = vertex["back-pressure"] || 0;
    const worst = Math.max(0, ...vertex.uids.map((uid) => operators?.[uid]?.key_group_skew || 0));
    const skew = worst ? `busiest key group ${worst.toFixed(1)}x the mean` : "";
    return svg("g", {}, svg("rect", { class: `node ${pressure > 0.5 ? "hot" : pressure > 0.1 ? "warm" : ""}`, x, y, width: 210, height: 80, rx: 8 }),
      text(x + 10, y + 20, vertex.name.length > 27 ? `${vertex.name.slice(0, 26)}…` : vertex.name, "node-title"), text(x + 10, y + 37, `parallelism ${vertex.parallelism} · ${vertex.status}`),
      text(x + 10, y + 53, `${records(vertex.metrics)} · back pressure ${Math.round(pressure * 100)} %`), skew ? text(x + 10, y + 69, skew) : null, svg("title", {}, document.createTextNode(vertex.name)));
  });
  return h("div", { class: "scroll" }, svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": "Dataflow graph" }, edges, boxes));
}

// One square per key group; the darker, the more entries.
export function heatMap(counts) {
  const values = Object.values(counts), top = Math.max(1, ...values);
  const mean = values.reduce((sum, value) => sum + value, 0) / Math.max(values.length, 1);
  return h("div", {}, h("div", { class: "heat", role: "img", "aria-label": "Entries by key group" }, Object.entries(counts).map(([group, value]) =>
    h("i", { title: `key group ${group}: ${count(value)} entries`, opacity_: String(0.08 + 0.92 * value / top) }))),
  h("p", { class: "small muted" }, `${values.length} key groups, ${count(Math.round(mean))} entries on average, ${count(top)} in the largest (${(top / Math.max(mean, 1)).toFixed(2)}x)`));
}

export { bytes };
function text(x, y, content, kind = "") { return svg("text", { x, y, class: kind }, document.createTextNode(content)); }
