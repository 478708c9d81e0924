// Small DOM helpers: elements, formats, tables, dialogs. Text is always set as text, never as markup.
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "width_") element.style.width = value;
    else if (name === "opacity_") element.style.opacity = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  for (const child of children.flat(3)) if (child !== null && child !== undefined) element.append(child);
  return element;
}

export const bytes = (value) => {
  if (value === null || value === undefined) return "–";
  let size = Number(value), unit = 0;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  while (size >= 1024 && unit < units.length - 1) { size /= 1024; unit += 1; }
  return `${unit ? size.toFixed(size < 10 ? 2 : 1) : size} ${units[unit]}`;
};
export const duration = (ms) => {
  if (ms === null || ms === undefined || ms < 0) return "–";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms < 3600000) return `${Math.floor(ms / 60000)} min ${Math.round((ms % 60000) / 1000)} s`;
  return `${Math.floor(ms / 3600000)} h ${Math.round((ms % 3600000) / 60000)} min`;
};
export const count = (value) => value === null || value === undefined ? "–" : Number(value).toLocaleString("en-US");
export const moment = (ms) => ms && ms > 0 ? new Date(ms).toLocaleString() : "–";
export const shown = (value) => value === null || value === undefined ? "null" : typeof value === "object" ? JSON.stringify(value) : String(value);

export function badge(state) {
  const kinds = { RUNNING: "good", COMPLETED: "good", FINISHED: "good", FAILED: "bad", LOST: "bad", SUSPENDED: "warn",
    IN_PROGRESS: "warn", RESTARTING: "warn", INITIALIZING: "warn", QUEUED: "plain" };
  return h("span", { class: `badge ${kinds[state] || "plain"}` }, state);
}

export function table(columns, rows, options = {}) {
  if (!rows.length) return h("div", { class: "empty" }, options.empty || "Nothing here yet.");
  const body = rows.map((row) => {
    const href = options.href && options.href(row);
    const line = h("tr", href ? { "data-href": href, tabindex: 0 } : {}, columns.map((column) =>
      h("td", { class: [column.number && "number", column.wide && "wide"].filter(Boolean).join(" ") || null }, column.cell(row))));
    if (href) {
      line.addEventListener("click", (event) => { if (!event.target.closest("a,button,input")) location.hash = href; });
      line.addEventListener("keydown", (event) => { if (event.key === "Enter") location.hash = href; });
    }
    return line;
  });
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, columns.map((column) => h("th", { scope: "col", class: [column.number && "number", column.wide && "wide"].filter(Boolean).join(" ") || null }, column.title)))),
    h("tbody", {}, body)));
}

export function figure(label, value) {
  return h("div", { class: "card" }, h("div", { class: "label" }, label), h("div", { class: "figure" }, value));
}

export function toast(text, bad = false) {
  const note = h("div", { class: `toast${bad ? " bad" : ""}` }, text);
  document.getElementById("toasts").append(note);
  setTimeout(() => note.remove(), bad ? 9000 : 4000);
}

// A form in a dialog: fields in, a promise of their values (or null when it is closed) out.
export function ask({ title, text, fields = [], action = "OK", danger = false }) {
  const dialog = document.getElementById("dialog");
  return new Promise((resolve) => {
    const inputs = fields.map((field) => field.options
      ? h("select", { name: field.name, id: `f-${field.name}` }, field.options.map((option) => h("option", { value: option }, option)))
      : field.type === "textarea" ? h("textarea", { name: field.name, id: `f-${field.name}`, rows: 6 }, field.value || "")
        : h("input", { name: field.name, id: `f-${field.name}`, type: field.type || "text", value: field.value ?? "", required: field.required, min: field.min, placeholder: field.placeholder }));
    const form = h("form", { method: "dialog" }, h("h2", {}, title), text ? h("p", {}, text) : null,
      fields.map((field, index) => [h("label", { for: `f-${field.name}` }, field.label), inputs[index]]),
      h("p", { class: "row" }, h("button", { value: "ok", class: danger ? "danger" : "primary" }, action),
        h("button", { value: "no", formnovalidate: true, type: "button", onclick: () => dialog.close("no") }, "Cancel")));
    dialog.replaceChildren(form);
    dialog.onclose = () => resolve(dialog.returnValue === "ok"
      ? Object.fromEntries(inputs.map((input) => [input.name, input.value])) : null);
    dialog.returnValue = "no";
    dialog.showModal();
  });
}

export function copyAs(entries) {
  return h("details", { class: "card small" }, h("summary", {}, "Copy as CLI / curl / Python"),
    Object.entries(entries).map(([name, text]) => h("div", {}, h("div", { class: "row between" }, h("span", { class: "label" }, name),
      h("button", { type: "button", onclick: () => navigator.clipboard.writeText(text).then(() => toast("Copied")) }, "Copy")), h("pre", {}, text))));
}

// A labelled input of a form.
export const field = (name, label, value = "", { long, ...extra } = {}) => h("label", { class: long ? "field long" : "field" }, label, h("input", { name, value, ...extra }));

export function tabs(names, current, select) {
  const list = h("div", { class: "tabs", role: "tablist" }, names.map((name) => h("button", { role: "tab", type: "button", "aria-selected": String(name === current), onclick: () => select(name) }, name)));
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) select(names[(names.indexOf(current) + step + names.length) % names.length]);
  });
  return list;
}
