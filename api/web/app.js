// The page's frame: routes by hash, keyboard, theme, live updates. Each view is a function that returns an element.
import { h, toast } from "/web/ui.js";
import { get } from "/web/api.js";
import * as jobs from "/web/jobs.js";
import * as snapshots from "/web/snapshots.js";
import * as operations from "/web/operations.js";

const ROUTES = [
  [/^\/jobs$/, jobs.list], [/^\/jobs\/([0-9a-f]{32})(?:\/(\w+))?$/, jobs.details],
  [/^\/snapshots$/, snapshots.list], [/^\/snapshot$/, snapshots.details], [/^\/diff$/, snapshots.diff],
  [/^\/operations$/, operations.list],
];
const main = document.getElementById("main");
let current = null, drawing = 0, underWay = 0, missed = false;

const focusable = () => [...main.querySelectorAll("a[href],button,input,select,textarea,summary,[tabindex='0']")];
const nameOf = (element) => element && `${element.tagName} ${element.dataset.href || element.getAttribute("href") || element.textContent}`;

// A view that is being fetched is not asked for anew by every change: on a busy service it would never be shown.
async function draw(keepFocus = false) {
  underWay += 1;
  try { await show(keepFocus); } finally { underWay -= 1; }
  if (missed && !underWay) { missed = false; refresh(); }
}

async function show(keepFocus) {
  const [path, query] = (location.hash.slice(1) || "/jobs").split("?");
  const found = ROUTES.map(([pattern, view]) => [pattern.exec(path), view]).find(([match]) => match);
  const turn = ++drawing;
  document.querySelectorAll("nav a").forEach((link) => {
    const section = link.getAttribute("href").slice(2).replace("snapshots", "snapshot");
    if (path.slice(1).startsWith(section)) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  });
  const tab = document.activeElement?.getAttribute("role") === "tab"; // asked now: what becomes inert loses the focus
  main.inert = Boolean(found) && !keepFocus; // what is still shown belongs to the page that was left
  if (!found) return main.replaceChildren(h("div", { class: "empty" }, "There is no such page."));
  try {
    const element = await found[1](new URLSearchParams(query), ...found[0].slice(1));
    if (turn !== drawing) return undefined;
    const scroll = window.scrollY, focused = focusable().indexOf(document.activeElement), named = nameOf(document.activeElement);
    main.replaceChildren(element);
    main.inert = false;
    if (keepFocus) {
      window.scrollTo(0, scroll);
      if (focused >= 0) { const all = focusable(); (all.find((other) => nameOf(other) === named) || all[focused])?.focus({ preventScroll: true }); }
    } else {
      window.scrollTo(0, 0);
      ((tab && main.querySelector('[role="tab"][aria-selected="true"]')) || main).focus({ preventScroll: true });
    }
    current = element;
  } catch (error) {
    if (turn !== drawing) return undefined;
    main.inert = false;
    main.replaceChildren(h("div", { class: "card error" }, error.message));
  }
  return undefined;
}

// Redraws views that live, unless somebody is typing or a dialog is open.
function refresh() {
  const busy = document.getElementById("dialog").open || document.activeElement?.matches("input,textarea,select") || !current?.dataset.live || document.querySelector("details[open]") || !getSelection().isCollapsed;
  if (underWay) missed = true;
  else if (!busy && !document.hidden) draw(true);
}

async function watch() {
  const light = document.getElementById("live");
  let seen = null;
  for (;;) {
    try {
      const state = await get("/api/changes", { since: seen });
      light.className = "live on"; light.textContent = "live";
      if (seen !== null && state.changes !== seen) refresh();
      seen = state.changes;
    } catch (error) {
      light.className = "live off"; light.textContent = "no connection";
      await new Promise((resolve) => setTimeout(resolve, 3000));
    }
  }
}

function theme(next) {
  const chosen = next || localStorage.getItem("holdfast-theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = chosen;
  if (next) localStorage.setItem("holdfast-theme", next);
}

document.getElementById("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input,textarea,select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const link = document.querySelector(`nav a[data-key="${event.key}"]`);
  if (link) location.hash = link.getAttribute("href");
  else if (event.key === "t") document.getElementById("theme").click();
  else if (event.key === "/") { const field = main.querySelector("input"); if (field) { event.preventDefault(); field.focus(); } }
  else if (event.key === "?") toast("1–4 pages · t theme · / search · Enter opens a row");
});
window.addEventListener("hashchange", () => draw());
window.addEventListener("redraw", () => draw(true));
theme();
draw();
watch();
