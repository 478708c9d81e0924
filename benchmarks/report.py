"""Results for people: a table in the terminal, Markdown for the docs, and one HTML page with charts and no network."""

from __future__ import annotations

import html
from typing import Any

from rich.console import Console
from rich.table import Table


def number(value: float | None) -> str:
    """A figure at a glance: 1.23M, 45.6k, 0.0123."""
    if value is None:
        return "–"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def verdict(contender: dict[str, Any]) -> str:
    """Where a ratio stands against what was asked."""
    floor, target, ratio = contender["asked_floor"], contender["asked_target"], contender["ratio"]
    if floor is None or ratio is None:
        return ""
    if ratio < floor:
        return f"below floor by {(1 - ratio / floor) * 100:.0f} %"
    return "target reached" if target is not None and ratio >= target else "floor held"


def _asked(contender: dict[str, Any]) -> str:
    floor, target = contender["asked_floor"], contender["asked_target"]
    return "" if floor is None else f"{floor:.3g}x" + (f" [{target:.3g}x]" if target is not None else "")


def _row(one: dict[str, Any], contender: dict[str, Any]) -> list[str]:
    if contender["failure"]:
        return [contender["name"], "–", "–", "–", "", contender["failure"]]
    note = "baseline" if contender["name"] == one["baseline"] else verdict(contender)
    if contender["name"] != one["baseline"] and not contender["stable"] and contender["rounds"] > 1:
        note = f"{note} (not stable)".strip()
    spread = f"±{contender['spread'] * 100:.0f} %" if contender["spread"] is not None else "–"
    return [contender["name"], f"{number(contender['median'])} {one['unit']}",
            f"{contender['ratio']:.3g}x" if contender["ratio"] is not None else "–", spread, _asked(contender), note]


HEADINGS = ("contender", "median", "ratio", "spread", "asked floor [target]", "")


def print_table(one: dict[str, Any], console: Console) -> None:
    """One benchmark in the terminal."""
    table = Table(title=f"{one['name']} (ratio to {one['baseline']})", title_justify="left")
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if index in (1, 2, 3) else "left")
    for contender in one["contenders"]:
        table.add_row(*_row(one, contender))
    console.print(table)


def markdown(document: dict[str, Any]) -> str:
    """The whole document as Markdown, for docs/benchmarks.md."""
    machine = document["machine"]
    lines = [f"Made by `{document['command']}` on {machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB, "
             f"Python {machine['python']}; " + ", ".join(f"{name} {text}" for name, text in document["versions"].items())
             + ("." if document["complete"] else ". **The run was interrupted: partial results.**"), ""]
    for one in document["benchmarks"]:
        lines += [f"### {one['name']}", "", one["statement"], "", "| " + " | ".join(HEADINGS) + " |",
                  "| --- | ---: | ---: | ---: | --- | --- |"]
        lines += ["| " + " | ".join(_row(one, contender)) + " |" for contender in one["contenders"]]
        lines.append("")
    return "\n".join(lines)


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:980px;margin:24px auto;padding:0 16px;color:#17202a;
background:#fff}
h1{font-size:24px}h2{font-size:17px;margin-top:32px}table{border-collapse:collapse;font-size:14px}
td,th{padding:4px 10px;border-bottom:1px solid #dde2e6;text-align:left}.n{text-align:right}.bar{fill:#0f766e}
.base{fill:#94a3b8}.bad{fill:#b91c1c}.muted{color:#5b6770}@media(prefers-color-scheme:dark){body{background:#11161b;
color:#e4e9ed}td,th{border-color:#2c363f}text{fill:#e4e9ed}}"""


def html_page(document: dict[str, Any]) -> str:
    """One page with a ratio chart and a table per benchmark; nothing is loaded from anywhere."""
    machine = document["machine"]
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>Holdfast benchmarks</title><style>{_STYLE}</style>",
             "<h1>Holdfast benchmarks</h1>",
             f"<p class=muted>{html.escape(document['command'])} · {machine['cores']} cores, {html.escape(machine['cpu'])}, "
             f"{machine['memory_gib']} GiB · Python {machine['python']}</p>",
             "" if document["complete"] else "<p><b>The run was interrupted: partial results.</b></p>"]
    for one in document["benchmarks"]:
        parts.append(f"<h2>{html.escape(one['name'])}</h2><p>{html.escape(one['statement'])}</p>{ratio_bars(one)}<table><tr>")
        parts += [f"<th>{heading}</th>" for heading in HEADINGS]
        for contender in one["contenders"]:
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in _row(one, contender))
            parts.append(f"<tr>{cells}</tr>")
        parts.append("</table>")
    return "".join(parts)


def ratio_bars(one: dict[str, Any]) -> str:
    """Bars of the ratios, the baseline in grey, what stays below an asked floor in red."""
    shown = [contender for contender in one["contenders"] if contender["ratio"] is not None]
    top = max((contender["ratio"] for contender in shown), default=1) or 1
    bars = []
    for index, contender in enumerate(shown):
        y, width = index * 26 + 4, max(2.0, contender["ratio"] / top * 560)
        kind = "base" if contender["name"] == one["baseline"] else "bar"
        kind = "bad" if verdict(contender).startswith("below") else kind
        bars.append(f'<text x="0" y="{y + 14}">{html.escape(contender["name"])}</text>'
                    f'<rect class="{kind}" x="200" y="{y}" width="{width:.1f}" height="18" rx="3"/>'
                    f'<text x="{206 + width:.1f}" y="{y + 14}">{contender["ratio"]:.3g}x</text>')
    height = len(shown) * 26 + 8
    return f'<svg viewBox="0 0 900 {height}" width="100%" font-size="13" role="img">{"".join(bars)}</svg>'
